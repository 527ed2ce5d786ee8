/* softmax(q k^T scale) v over paged bf16 keys and values, causal, grouped-query, for few queries.
 *
 * Bound: the bytes of the visible keys and values, 4 D bytes a token and kv head, once. A context is cut into at most 16 parts (a number that
 * depends on its length alone, so results do not depend on neighbours or threads); each part keeps a running maximum and sum (online
 * softmax, Milakov & Gimelshein 2018) and whoever finishes the last part of a head joins them in order.
 *
 * n: T, R, Hq, Hk, D, page_size, max_pages, window (0: none), q row stride in elements; f: scale;
 * p: q [T, Hq, D], keys, values [pages, page_size, Hk, D], query_start int32 [R + 1], seq_lens int32 [R], page_table int32 [R, max_pages],
 *    out [T, Hq D], sinks float [Hq] or NULL: a logit more in the softmax's denominator.
 * Tokens that belong to no request, and requests without context, get zeros.
 */
#include "simd.h"
#include "ts.h"

enum { MAX_SPLITS = 16, BLOCK = 64, MAX_DIM = 512, MAX_HEADS = 4, NUM_COUNTERS = 1 << 16 };

typedef struct {
    long request, start, limit; /* visible positions: [start, limit) */
    long part, splits;          /* positions a part, number of parts (at least 1) */
    long first_item;
} query;

static void split(query *q) {
    long visible = ts_max(0, q->limit - q->start);
    q->part = ts_max(BLOCK, ts_ceil_div(ts_ceil_div(visible, MAX_SPLITS), BLOCK) * BLOCK);
    q->splits = ts_max(1, ts_ceil_div(visible, q->part));
}

/* Visits the queries in order; fills `queries` when given. Returns the number of items. */
static long plan(const ts_call *call, query *queries) {
    const int32_t *query_start = call->p[3], *seq_lens = call->p[4];
    long num_tokens = call->n[0], window = call->n[7], items = 0, r = 0;
    for (long t = 0; t < num_tokens; t++) {
        while (r < call->n[1] && t >= query_start[r + 1]) r++;
        query q = {r, 0, 0, 0, 0, items};
        if (r < call->n[1] && t >= query_start[r]) {
            q.limit = seq_lens[r] - query_start[r + 1] + t + 1;
            q.start = window ? ts_max(0, q.limit - window) : 0;
        }
        split(&q);
        items += q.splits * call->n[3];
        if (queries) queries[t] = q;
    }
    return items;
}

static long attention_items(const ts_call *call) { return plan(call, NULL); }
static long one(const ts_call *call) {
    (void)call;
    return 1;
}

/* What one part knows of one head: maximum, sum of exponentials, then the weighted values. */
static long partial_floats(long dim) { return dim + 16; }

static size_t attention_shared(const ts_call *call) {
    return NUM_COUNTERS * 4 + (size_t)(call->n[0] * call->n[2] * MAX_SPLITS * partial_floats(call->n[4])) * sizeof(float);
}

typedef struct {
    const bf16 *keys[BLOCK], *values[BLOCK];
    long count;
} block;

/* Where the tokens [from, to) of a request lie; entries past the end repeat the last, their weight will be zero. */
static void find(const ts_call *call, long request, long kv_head, long from, long to, block *b) {
    const int32_t *pages = (const int32_t *)call->p[5] + request * call->n[6];
    long page_size = call->n[5], row = call->n[3] * call->n[4];
    long page = from / page_size, offset = from - page * page_size; /* divided once: a division a token costs as much as its products */
    b->count = to - from;
    for (long i = 0; i < BLOCK; i++) {
        long at = ((long)pages[page] * page_size + offset) * row + kv_head * call->n[4];
        b->keys[i] = (const bf16 *)call->p[1] + at;
        b->values[i] = (const bf16 *)call->p[2] + at;
        if (i + 1 < b->count && ++offset == page_size) {
            offset = 0;
            page++;
        }
    }
}

/* Rows of one head are short and far apart, which no hardware prefetcher follows. */
TS_INLINE void fetch_row(const bf16 *row, long dim) {
    for (long d = 0; d < dim; d += 32) __builtin_prefetch(row + d, 0, 3);
}

/* On the way: this block's values and the next block's keys are asked for. */
TS_INLINE void block_scores(const int heads, const long dim, const block *b, const block *next, const float *q, float scores[MAX_HEADS][BLOCK]) {
    for (long first = 0; first < b->count; first += 16) {
        v16f sums[MAX_HEADS][16];
        for (long t = 0; t < 16; t++) {
            v16f sum[MAX_HEADS];
            fetch_row(b->values[first + t], dim);
            fetch_row(next->keys[first + t], dim);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) sum[h] = v_set(0);
            for (long d = 0; d < dim; d += 16) {
                v16f k = v_load_bf16(b->keys[first + t] + d);
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++) sum[h] += k * v_load(q + h * dim + d);
            }
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) sums[h][t] = sum[h];
        }
        for (int h = 0; h < heads; h++) v_store(scores[h] + first, v_sum16(sums[h]));
    }
}

/* scores -> weights in place (zero past the end); returns the factor for what was summed before, and updates maximum and sum. */
static float block_softmax(float *scores, long count, float *maximum, float *total) {
    v16f sum = v_set(0), maxima = v_set(*maximum);
    for (long i = count; i < ts_ceil_div(count, 16) * 16; i++) scores[i] = -1e30f;
    for (long i = 0; i < count; i += 16) maxima = v_max(v_load(scores + i), maxima);
    float largest = v_largest(maxima);
    for (long i = 0; i < count; i += 16) {
        v16f s = v_load(scores + i);
        v16f p = v_select(s <= v_set(-1e29f), v_set(0), v_exp(s - v_set(largest))); /* NaN stays NaN */
        v_store(scores + i, p);
        sum += p;
    }
    float factor = *total > 0 ? v_exp(v_set(*maximum - largest))[0] : 0;
    *total = *total * factor + v_sum(sum);
    *maximum = largest;
    return factor;
}

/* Columns [d0, d0 + 16 vectors) of the weighted sum of values. */
TS_INLINE void value_columns(const int heads, const int vectors, long dim, long d0, const block *b, float weights[MAX_HEADS][BLOCK],
                             const float *factors, float *acc) {
    v16f sum[MAX_HEADS][4];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) sum[h][c] = v_load(acc + h * dim + d0 + 16 * c) * v_set(factors[h]);
    for (long t = 0; t < b->count; t++)
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) {
            v16f v = v_load_bf16(b->values[t] + d0 + 16 * c);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) sum[h][c] += v * v_set(weights[h][t]);
        }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) v_store(acc + h * dim + d0 + 16 * c, sum[h][c]);
}

TS_INLINE void block_values(const int heads, long dim, const block *b, float weights[MAX_HEADS][BLOCK], const float *factors, float *acc) {
    long d = 0;
    for (; d + 64 <= dim; d += 64) value_columns(heads, 4, dim, d, b, weights, factors, acc); /* 64 columns of 4 heads: 16 registers */
    for (; d < dim; d += 16) value_columns(heads, 1, dim, d, b, weights, factors, acc);
}

typedef struct {
    float maximum[MAX_HEADS], total[MAX_HEADS];
    _Alignas(64) float acc[MAX_HEADS * MAX_DIM];
} partial;

TS_INLINE void attend(const int heads, const long dim, const ts_call *call, const query *query, long kv_head, long from, long to, const float *q, partial *out) {
    for (int h = 0; h < heads; h++) {
        out->maximum[h] = -3e38f;
        out->total[h] = 0;
    }
    memset(out->acc, 0, (size_t)(heads * dim) * sizeof(float));
    block blocks[2];
    if (from < to) find(call, query->request, kv_head, from, ts_min(from + BLOCK, to), &blocks[0]);
    for (long t = 0; from < to && t < BLOCK; t++) fetch_row(blocks[0].keys[t], dim);
    for (long at = from, turn = 0; at < to; at += BLOCK, turn ^= 1) {
        block *b = &blocks[turn], *next = &blocks[turn ^ 1];
        float scores[MAX_HEADS][BLOCK], factors[MAX_HEADS];
        if (at + BLOCK < to)
            find(call, query->request, kv_head, at + BLOCK, ts_min(at + 2 * BLOCK, to), next);
        else
            next = b;
        block_scores(heads, dim, b, next, q, scores);
        for (int h = 0; h < heads; h++) factors[h] = block_softmax(scores[h], b->count, &out->maximum[h], &out->total[h]);
        block_values(heads, dim, b, scores, factors, out->acc);
    }
}

#define ATTEND(HEADS, DIM, NAME)                                                                                                    \
    static void attend_##HEADS##_##NAME(const ts_call *c, const query *u, long kv, long from, long to, const float *q, partial *out) { \
        attend(HEADS, DIM, c, u, kv, from, to, q, out);                                                                             \
    }
ATTEND(1, 64, 64) ATTEND(2, 64, 64) ATTEND(3, 64, 64) ATTEND(4, 64, 64)
ATTEND(1, 128, 128) ATTEND(2, 128, 128) ATTEND(3, 128, 128) ATTEND(4, 128, 128)
ATTEND(1, c->n[4], any) ATTEND(2, c->n[4], any) ATTEND(3, c->n[4], any) ATTEND(4, c->n[4], any)

typedef void (*attend_function)(const ts_call *, const query *, long, long, long, const float *, partial *);
static const attend_function attend_functions[3][MAX_HEADS] = {
    {attend_1_64, attend_2_64, attend_3_64, attend_4_64},
    {attend_1_128, attend_2_128, attend_3_128, attend_4_128},
    {attend_1_any, attend_2_any, attend_3_any, attend_4_any},
};

/* What the weighted values are divided by, as a factor: the sum of exponentials, and exp(sink - maximum) where there is a sink. */
static float share(float maximum, float total, const float *sink) {
    if (total == 0) return 0; /* no context */
    if (!sink) return 1.0f / total;
    float largest = *sink > maximum ? *sink : maximum;
    float factor = v_exp(v_set(maximum - largest))[0];
    return factor / (total * factor + v_exp(v_set(*sink - largest))[0]);
}

static void store_head(bf16 *out, const float *acc, float factor, long dim) {
    v16f inverse = v_set(factor);
    for (long d = 0; d < dim; d += 16) v_store_bf16(out + d, v_load(acc + d) * inverse);
}

/* Join the parts of one head, in order. */
static void join(const float *parts, long splits, long dim, const float *sink, bf16 *out) {
    _Alignas(64) float acc[MAX_DIM] = {0};
    float largest = parts[0], total = 0;
    long stride = partial_floats(dim);
    for (long s = 1; s < splits; s++) largest = parts[s * stride] > largest ? parts[s * stride] : largest;
    for (long s = 0; s < splits; s++) {
        const float *part = parts + s * stride;
        float factor = v_exp(v_set(part[0] - largest))[0];
        total += part[1] * factor;
        for (long d = 0; d < dim; d += 16) v_store(acc + d, v_load(acc + d) + v_load(part + 16 + d) * v_set(factor));
    }
    store_head(out, acc, share(largest, total, sink), dim);
}

static void run_attention(const ts_call *call, long begin, long end, ts_thread *thread) {
    long num_tokens = call->n[0], num_heads = call->n[2], num_kv = call->n[3], dim = call->n[4], group = num_heads / num_kv;
    query *queries = ts_scratch(thread, (size_t)num_tokens * sizeof(query));
    if (ts_first_item(thread, call)) plan(call, queries);
    int32_t *counters = (int32_t *)thread->shared;
    const float *sinks = call->p[7];
    float *partials = (float *)(thread->shared + NUM_COUNTERS * 4);
    long stride = partial_floats(dim), t = 0;
    for (long item = begin; item < end; item++) {
        while (t + 1 < num_tokens && queries[t + 1].first_item <= item) t++;
        const query *query = &queries[t];
        /* The heads of a part follow each other: their rows lie on the same pages. */
        long s = (item - query->first_item) / num_kv, kv_head = (item - query->first_item) % num_kv;
        long from = query->start + s * query->part, to = ts_min(from + query->part, query->limit);
        for (long first = 0; first < group; first += MAX_HEADS) {
            long heads = ts_min(MAX_HEADS, group - first), head0 = kv_head * group + first;
            _Alignas(64) float q[MAX_HEADS * MAX_DIM];
            partial result;
            for (long h = 0; h < heads; h++)
                for (long d = 0; d < dim; d += 16)
                    v_store(q + h * dim + d, v_load_bf16((const bf16 *)call->p[0] + t * call->n[8] + (head0 + h) * dim + d) * v_set(call->f[0]));
            attend_functions[dim == 64 ? 0 : dim == 128 ? 1 : 2][heads - 1](call, query, kv_head, from, to, q, &result);
            for (long h = 0; h < heads; h++) {
                if (query->splits == 1) {
                    float factor = share(result.maximum[h], result.total[h], sinks ? sinks + head0 + h : NULL);
                    store_head((bf16 *)call->p[6] + (t * num_heads + head0 + h) * dim, result.acc + h * dim, factor, dim);
                    continue;
                }
                float *part = partials + ((t * num_heads + head0 + h) * MAX_SPLITS + s) * stride;
                part[0] = result.maximum[h];
                part[1] = result.total[h];
                memcpy(part + 16, result.acc + h * dim, (size_t)dim * sizeof(float));
            }
        }
        if (query->splits > 1) {
            int32_t *done = &counters[t * num_kv + kv_head];
            if (__atomic_fetch_add(done, 1, __ATOMIC_ACQ_REL) == query->splits - 1) {
                *done = 0; /* for the next call; nobody else looks any more */
                for (long h = kv_head * group; h < (kv_head + 1) * group; h++)
                    join(partials + (t * num_heads + h) * MAX_SPLITS * stride, query->splits, dim, sinks ? sinks + h : NULL,
                         (bf16 *)call->p[6] + (t * num_heads + h) * dim);
            }
        }
    }
}

const ts_op ts_attention = {"paged_attention", attention_items, one, run_attention, attention_shared, NULL};
