/* y[M, N] = x[M, K] W[N, K]^T for few rows: W block-quantized (codes in groups along K, one scale and perhaps one minimum a group) or bf16.
 *
 * Bound: the bytes of W, once: K N (bits + 16/group (+ 16/group)) / 8. With M <= 8 rows on two AVX-512 cores the arithmetic stays below it.
 * Sixteen outputs lie in the sixteen lanes, so no sums across lanes are needed; for M rows each weight is expanded once and used M times.
 * All sums are float, in an order that depends on K alone: a row's result does not depend on M, on the other rows or on the threads.
 *
 * Layout of a quantized weight: tiles of 16 outputs, one after the other; in a tile, with G = K / group:
 *     scales  half [G][16]
 *     minima  half [G][16]                     (only when the type has them)
 *     codes   4 bit: uint32 [K / 8][16]: lane n of vector v holds codes k = 8v .. 8v+7 of output n, lowest bits first;
 *             8 bit: int8 [K][16]
 * value = scale * code + minimum; without minima a 4-bit code means code - 8.
 */
#include "simd.h"
#include "ts.h"

enum { TS_FLOAT_OUT = 1, PREFETCH_AHEAD = 3072 };

#ifdef TS_AVX512
enum { MAX_ROWS = 8 };
#else
enum { MAX_ROWS = 2 }; /* sixteen 32-byte registers hold no more */
#endif

typedef struct {
    long rows, in, out, bits, group, has_min;
    long groups, head_bytes, tile_bytes; /* head: scales and minima */
} shape;

static shape shape_of(const ts_call *call) {
    shape s = {call->n[0], call->n[1], call->n[2], call->n[3], call->n[4], call->n[5], 0, 0, 0};
    s.groups = s.in / s.group;
    s.head_bytes = ts_ceil_div(s.groups * 32 * (1 + s.has_min), 64) * 64;
    s.tile_bytes = s.head_bytes + s.in * 2 * s.bits;
    return s;
}

/* Scratch: x as float [M][K], then sums of each group of x [M][groups rounded up to 16] where minima need them. */
static float *prepare(const ts_call *call, const shape *s, ts_thread *thread) {
    long sums_stride = s->has_min ? ts_ceil_div(s->groups, 16) * 16 : 0;
    float *x = ts_scratch(thread, (size_t)(s->rows * (s->in + sums_stride)) * sizeof(float));
    if (!ts_first_item(thread, call)) return x;
    const bf16 *source = call->p[0];
    for (long i = 0; i < s->rows * s->in; i += 16) v_store(x + i, v_load_bf16(source + i)); /* in is a multiple of 16 */
    for (long r = 0; r < s->rows && s->has_min; r++)
        for (long g = 0; g < s->groups; g += 16) {
            v16f parts[16];
            for (long i = 0; i < 16; i++) {
                const float *at = x + r * s->in + (g + i) * s->group;
                parts[i] = g + i < s->groups ? v_load(at) : v_set(0);
                if (s->group == 32 && g + i < s->groups) parts[i] += v_load(at + 16);
            }
            v_store(x + s->rows * s->in + r * sums_stride + g, v_sum16(parts));
        }
    return x;
}

static void store_outputs(const ts_call *call, long row, long first, long width, long out, v16f sum) {
    const bf16 *bias = call->p[2];
    float y[16];
    if (width == 16) {
        if (bias) sum += v_load_bf16(bias + first);
        if (call->flags & TS_FLOAT_OUT)
            v_store((float *)call->p[3] + row * out + first, sum);
        else
            v_store_bf16((bf16 *)call->p[3] + row * out + first, sum);
        return;
    }
    v_store(y, sum);
    for (long i = 0; i < width; i++) {
        if (bias) y[i] += bf16_to_float(bias[first + i]);
        if (call->flags & TS_FLOAT_OUT)
            ((float *)call->p[3])[row * out + first + i] = y[i];
        else
            ((bf16 *)call->p[3])[row * out + first + i] = bf16_from_float(y[i]);
    }
}

/* Sixteen inputs of one group times sixteen outputs, for `rows` rows. Two sums a row keep the multiply-adds independent. */
TS_INLINE void sixteen_inputs(const int rows, const int bits, const char *codes, v16f table, const float *const *x, long k, v16f *even, v16f *odd) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        v16f w;
        if (bits == 4) {
            v16u packed;
            memcpy(&packed, codes + i / 8 * 64, 64);
            w = v_lookup16(table, packed >> (4 * (i % 8)));
        } else {
            w = v_load_int8((const int8_t *)codes + 16 * i);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            if (i % 2)
                odd[r] += w * v_set(x[r][k + i]);
            else
                even[r] += w * v_set(x[r][k + i]);
        }
    }
}

TS_INLINE void tile_rows(const int rows, const int bits, const char *tile, const shape *s, const float *const *x, const float *const *sums, v16f *sum) {
    const uint16_t *scales = (const uint16_t *)tile, *minima = scales + s->groups * 16;
    const char *codes = tile + s->head_bytes, *ahead = tile + PREFETCH_AHEAD;
    const long ahead_step = s->tile_bytes / s->groups, half_bytes = 32 * bits;
    v16f table;
    for (int i = 0; i < 16; i++) table[i] = (float)(s->has_min ? i : i - 8);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sum[r] = v_set(0);
    for (long g = 0; g < s->groups; g++) {
        v16f even[MAX_ROWS], odd[MAX_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) even[r] = odd[r] = v_set(0);
        for (long line = 0; line < ahead_step; line += 64) __builtin_prefetch(ahead + line, 0, 3);
        ahead += ahead_step;
        for (long k = g * s->group; k < (g + 1) * s->group; k += 16, codes += half_bytes)
            sixteen_inputs(rows, bits, codes, table, x, k, even, odd);
        v16f scale = v_load_half(scales + 16 * g);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sum[r] += (even[r] + odd[r]) * scale;
        if (s->has_min) {
            v16f minimum = v_load_half(minima + 16 * g);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) sum[r] += minimum * v_set(sums[r][g]);
        }
    }
}

#define TILE(ROWS, BITS)                                                                                                                  \
    static void tile_##ROWS##_##BITS(const char *tile, const shape *s, const float *const *x, const float *const *sums, v16f *sum) {      \
        tile_rows(ROWS, BITS, tile, s, x, sums, sum);                                                                                     \
    }
TILE(1, 4) TILE(2, 4) TILE(1, 8) TILE(2, 8)
#ifdef TS_AVX512
TILE(4, 4) TILE(8, 4) TILE(4, 8) TILE(8, 8)
#endif

static void run_tile(long rows, long bits, const char *tile, const shape *s, const float *const *x, const float *const *sums, v16f *sum) {
    int four = bits == 4;
    if (rows == 1) (four ? tile_1_4 : tile_1_8)(tile, s, x, sums, sum);
    else if (rows == 2) (four ? tile_2_4 : tile_2_8)(tile, s, x, sums, sum);
#ifdef TS_AVX512
    else if (rows <= 4) (four ? tile_4_4 : tile_4_8)(tile, s, x, sums, sum);
    else (four ? tile_8_4 : tile_8_8)(tile, s, x, sums, sum);
#endif
}

static long sixteen_outputs(const ts_call *call) { return ts_ceil_div(call->n[2], 16); }
static long about_16_kb(const ts_call *call) { return ts_max(1, 16384 / ts_max(1, call->n[1] * 10)); }

/* n: M, K, N, bits, group, has_min; flags: TS_FLOAT_OUT; p: x bf16 [M, K], weight tiles, bias bf16 [N] or NULL, out [M, N]. */
static void run_block_linear(const ts_call *call, long begin, long end, ts_thread *thread) {
    shape s = shape_of(call);
    const float *x = prepare(call, &s, thread), *sums = x + s.rows * s.in;
    long sums_stride = s.has_min ? ts_ceil_div(s.groups, 16) * 16 : 0;
    for (long item = begin; item < end; item++) {
        const char *tile = (const char *)call->p[1] + item * s.tile_bytes;
        for (long first = 0; first < s.rows; first += MAX_ROWS) {
            long rows = ts_min(MAX_ROWS, s.rows - first);
            const float *x_rows[MAX_ROWS], *sum_rows[MAX_ROWS];
            v16f sum[MAX_ROWS];
            for (long r = 0; r < MAX_ROWS; r++) { /* a kernel for 8 rows may be given 5: the others repeat the last */
                long row = first + ts_min(r, rows - 1);
                x_rows[r] = x + row * s.in;
                sum_rows[r] = sums + row * sums_stride;
            }
            run_tile(rows, s.bits, tile, &s, x_rows, sum_rows, sum);
            for (long r = 0; r < rows; r++) store_outputs(call, first + r, item * 16, ts_min(16, s.out - item * 16), s.out, sum[r]);
        }
    }
}

static size_t block_span(const ts_call *call, long item, const char **start) {
    shape s = shape_of(call);
    *start = (const char *)call->p[1] + item * s.tile_bytes;
    return (size_t)s.tile_bytes;
}

const ts_op ts_block_linear = {"block_linear", sixteen_outputs, about_16_kb, run_block_linear, NULL, block_span};

/* Four weight rows times four activation rows; lane 4 o + r of the result is row r of output o. x is padded with zeros to a multiple
 * of 16. Fewer rows are repeated: 8 or 16 weight rows at once instead are too many streams (269 MB in 24 ms, with four 14 ms).
 * Rows are short, so hardware prefetching is late: fetch linearly what the next call reads. */
static v16f sixteen_dots(const bf16 *const *weight, const float *const *x, long in) {
    enum { outs = 4, rows = 4 };
    const char *ahead = (const char *)(weight[0] + outs * in);
    v16f sum[16];
    long k = 0;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) sum[i] = v_set(0);
    for (; k + 16 <= in; k += 16) {
        v16f xk[4];
#pragma GCC unroll 8
        for (int line = 0; line < outs / 2; line++) __builtin_prefetch(ahead + 64 * line, 0, 3);
        ahead += 32 * outs;
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) xk[r] = v_load(x[r] + k);
#pragma GCC unroll 16
        for (int o = 0; o < outs; o++) {
            v16f w = v_load_bf16(weight[o] + k);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sum[o * rows + r] += w * xk[r];
        }
    }
    if (k < in)
        for (int o = 0; o < outs; o++) {
            bf16 tail[16] = {0};
            memcpy(tail, weight[o] + k, (size_t)(in - k) * 2);
            for (int r = 0; r < rows; r++) sum[o * rows + r] += v_load_bf16(tail) * v_load(x[r] + k);
        }
    return v_sum16(sum);
}

/* n: M, K, N; flags: TS_FLOAT_OUT; p: x bf16 [M, K], weight bf16 [N, K], bias bf16 [N] or NULL, out [M, N]. */
static void run_linear(const ts_call *call, long begin, long end, ts_thread *thread) {
    long num_rows = call->n[0], in = call->n[1], out = call->n[2], stride = ts_ceil_div(in, 16) * 16;
    float *x = ts_scratch(thread, (size_t)(num_rows * stride) * sizeof(float));
    if (ts_first_item(thread, call))
        for (long r = 0; r < num_rows; r++)
            for (long k = 0; k < stride; k++) x[r * stride + k] = k < in ? bf16_to_float(((const bf16 *)call->p[0])[r * in + k]) : 0;
    enum { rows = 4, outs = 4 };
    for (long item = begin; item < end; item++) {
        long base = item * 16, width = ts_min(16, out - base);
        for (long first = 0; first < num_rows; first += rows) {
            float y[16][4];
            for (long o = 0; o < 16; o += outs) {
                const bf16 *w[outs];
                const float *x_rows[rows];
                for (long i = 0; i < outs; i++) w[i] = (const bf16 *)call->p[1] + ts_min(base + o + i, out - 1) * in;
                for (long r = 0; r < rows; r++) x_rows[r] = x + ts_min(first + r, num_rows - 1) * stride;
                float dots[16];
                v_store(dots, sixteen_dots(w, x_rows, in));
                for (long i = 0; i < 16; i++) y[o + i / rows][i % rows] = dots[i];
            }
            for (long r = 0; r < ts_min(rows, num_rows - first); r++) {
                float row[16];
                for (long i = 0; i < 16; i++) row[i] = y[i][r];
                store_outputs(call, first + r, base, width, out, v_load(row));
            }
        }
    }
}

static size_t linear_span(const ts_call *call, long item, const char **start) {
    *start = (const char *)call->p[1] + item * 32 * call->n[1];
    return (size_t)ts_min(16, call->n[2] - item * 16) * 2 * (size_t)call->n[1];
}

static long about_32_kb(const ts_call *call) { return ts_max(1, 32768 / ts_max(1, call->n[1] * 32)); }

const ts_op ts_linear = {"linear", sixteen_outputs, about_32_kb, run_linear, NULL, linear_span};
