/* Embedding, norms, rotary and activation: bf16 in and out, float inside, one rounding at the end. Bound by latency, not by bytes:
 * a row of 576 is 1.2 KB. */
#include <math.h>

#include "simd.h"
#include "ts.h"

static long one_row_an_item(const ts_call *call) { return call->n[0]; }
static long few_rows(const ts_call *call) { return ts_max(1, 4096 / ts_max(1, call->n[1])); }

/* n: T, H, V; p: token ids int64 [T], table [V, H], out [T, H]. An id outside the table gives NaN, not foreign memory. */
static void run_embedding(const ts_call *call, long begin, long end, ts_thread *thread) {
    (void)thread;
    const int64_t *ids = call->p[0];
    long width = call->n[1];
    for (long t = begin; t < end; t++) {
        bf16 *out = (bf16 *)call->p[2] + t * width;
        if (ids[t] >= 0 && ids[t] < call->n[2])
            memcpy(out, (const bf16 *)call->p[1] + ids[t] * width, (size_t)width * 2);
        else
            for (long i = 0; i < width; i++) out[i] = 0x7fc0;
    }
}

const ts_op ts_embedding = {"embedding", one_row_an_item, few_rows, run_embedding, NULL, NULL};

static void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, long width, float eps) {
    v16f squares = v_set(0);
    float tail = 0;
    long i = 0;
    for (; i + 16 <= width; i += 16) {
        v16f v = v_load_bf16(x + i);
        squares += v * v;
    }
    for (; i < width; i++) tail += bf16_to_float(x[i]) * bf16_to_float(x[i]);
    float factor = 1.0f / sqrtf((v_sum(squares) + tail) / (float)width + eps);
    for (i = 0; i + 16 <= width; i += 16) v_store_bf16(out + i, v_load_bf16(x + i) * v_set(factor) * v_load_bf16(weight + i));
    for (; i < width; i++) out[i] = bf16_from_float(bf16_to_float(x[i]) * factor * bf16_to_float(weight[i]));
}

/* n: T, H; f: eps; p: x [T, H], weight [H], out [T, H]. */
static void run_rms_norm(const ts_call *call, long begin, long end, ts_thread *thread) {
    (void)thread;
    long width = call->n[1];
    for (long t = begin; t < end; t++)
        norm_row((const bf16 *)call->p[0] + t * width, call->p[1], (bf16 *)call->p[2] + t * width, width, call->f[0]);
}

const ts_op ts_rms_norm = {"rms_norm", one_row_an_item, few_rows, run_rms_norm, NULL, NULL};

/* As rms_norm, and p[3]: residual [T, H], to which x is added first (rounded to bf16 before the norm, as in the reference). */
static void run_add_rms_norm(const ts_call *call, long begin, long end, ts_thread *thread) {
    (void)thread;
    long width = call->n[1];
    for (long t = begin; t < end; t++) {
        const bf16 *x = (const bf16 *)call->p[0] + t * width;
        bf16 *residual = (bf16 *)call->p[3] + t * width;
        long i = 0;
        for (; i + 16 <= width; i += 16) v_store_bf16(residual + i, v_load_bf16(residual + i) + v_load_bf16(x + i));
        for (; i < width; i++) residual[i] = bf16_from_float(bf16_to_float(residual[i]) + bf16_to_float(x[i]));
        norm_row(residual, call->p[1], (bf16 *)call->p[2] + t * width, width, call->f[0]);
    }
}

const ts_op ts_add_rms_norm = {"add_rms_norm", one_row_an_item, few_rows, run_add_rms_norm, NULL, NULL};

enum { MAX_HEAD_DIM = 512 };

/* x [D] -> out [D], optional RMSNorm, then rotary on pairs (i, i + D/2). x and out may be the same. */
static void rotate_head(const bf16 *x, bf16 *out, const bf16 *norm, float eps, const float *cos_sin, long dim) {
    float head[MAX_HEAD_DIM];
    long half = dim / 2;
    for (long i = 0; i < dim; i++) head[i] = bf16_to_float(x[i]);
    if (norm) {
        float sum = 0;
        for (long i = 0; i < dim; i++) sum += head[i] * head[i];
        float factor = 1.0f / sqrtf(sum / (float)dim + eps);
        for (long i = 0; i < dim; i++) head[i] = head[i] * factor * bf16_to_float(norm[i]);
    }
    for (long i = 0; i < half; i++) {
        float first = head[i], second = head[half + i], c = cos_sin[i], s = cos_sin[half + i];
        head[i] = first * c - second * s;
        head[half + i] = second * c + first * s;
    }
    for (long i = 0; i < dim; i++) out[i] = bf16_from_float(head[i]);
}

static long heads_of_rows(const ts_call *call) { return call->n[0] * (call->n[1] + 2 * call->n[2]); }
static long sixteen(const ts_call *call) {
    (void)call;
    return 16;
}

/* n: T, Hq, Hk, D; f: eps; p: qkv [T, (Hq + 2 Hk) D] (queries rotated in place), positions int64 [T], cos_sin float [., D],
 * keys and values [slots, Hk, D], slots int64 [T], q_norm, k_norm [D] or NULL. A negative slot is a padding row: nothing is written. */
static void run_qkv_rope_cache(const ts_call *call, long begin, long end, ts_thread *thread) {
    (void)thread;
    long num_heads = call->n[1], num_kv = call->n[2], dim = call->n[3], row_heads = num_heads + 2 * num_kv;
    const int64_t *positions = call->p[1], *slots = call->p[5];
    for (long item = begin; item < end; item++) {
        long t = item / row_heads, head = item % row_heads;
        bf16 *x = (bf16 *)call->p[0] + item * dim;
        const float *cos_sin = (const float *)call->p[2] + positions[t] * dim;
        if (head < num_heads) {
            rotate_head(x, x, call->p[6], call->f[0], cos_sin, dim);
        } else if (slots[t] >= 0) {
            long kv_head = head - num_heads;
            if (kv_head < num_kv)
                rotate_head(x, (bf16 *)call->p[3] + (slots[t] * num_kv + kv_head) * dim, call->p[7], call->f[0], cos_sin, dim);
            else
                memcpy((bf16 *)call->p[4] + (slots[t] * num_kv + kv_head - num_kv) * dim, x, (size_t)dim * 2);
        }
    }
}

const ts_op ts_qkv_rope_cache = {"qkv_rope_cache", heads_of_rows, sixteen, run_qkv_rope_cache, NULL, NULL};

enum { SILU_COLUMNS = 512 };

static long silu_blocks(const ts_call *call) { return call->n[0] * ts_ceil_div(call->n[1], SILU_COLUMNS); }
static long two(const ts_call *call) {
    (void)call;
    return 2;
}

/* n: T, I; p: gate_up [T, 2 I], out [T, I]. */
static void run_silu_and_mul(const ts_call *call, long begin, long end, ts_thread *thread) {
    (void)thread;
    long width = call->n[1], blocks = ts_ceil_div(width, SILU_COLUMNS);
    for (long item = begin; item < end; item++) {
        long t = item / blocks, first = item % blocks * SILU_COLUMNS, last = ts_min(first + SILU_COLUMNS, width), i = first;
        const bf16 *gate = (const bf16 *)call->p[0] + t * 2 * width, *up = gate + width;
        bf16 *out = (bf16 *)call->p[1] + t * width;
        for (; i + 16 <= last; i += 16) {
            v16f g = v_load_bf16(gate + i);
            v_store_bf16(out + i, g / (v_set(1.0f) + v_exp(-g)) * v_load_bf16(up + i));
        }
        for (; i < last; i++) {
            float g = bf16_to_float(gate[i]);
            out[i] = bf16_from_float(g / (1.0f + expf(-g)) * bf16_to_float(up[i]));
        }
    }
}

const ts_op ts_silu_and_mul = {"silu_and_mul", silu_blocks, two, run_silu_and_mul, NULL, NULL};
