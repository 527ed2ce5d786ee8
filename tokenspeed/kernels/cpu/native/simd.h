/* Sixteen floats at a time, in the vector extension that gcc and clang share. The compiler lowers it to AVX-512, AVX2, NEON or scalars;
 * only the few functions that it lowers badly have an AVX-512 twin. TS_PORTABLE leaves the twins out (tests compile both). */
#ifndef TS_SIMD_H
#define TS_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(TS_PORTABLE)
#define TS_AVX512 1
#include <immintrin.h>
#endif

#define TS_INLINE static inline __attribute__((always_inline))

typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));
typedef int16_t v16s __attribute__((vector_size(32)));
typedef int8_t v16b __attribute__((vector_size(16)));
typedef uint16_t bf16; /* the bits; never an arithmetic type */

TS_INLINE v16f v_set(float x) { return (v16f){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

TS_INLINE v16f v_load(const float *p) {
    v16f v;
    memcpy(&v, p, sizeof v);
    return v;
}

TS_INLINE void v_store(float *p, v16f v) { memcpy(p, &v, sizeof v); }

TS_INLINE v16f v_select(v16i mask, v16f yes, v16f no) { return (v16f)(((v16i)yes & mask) | ((v16i)no & ~mask)); }

TS_INLINE v16f v_max(v16f a, v16f b) { return v_select(a > b, a, b); }

TS_INLINE float bf16_to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Round to nearest even, as torch does; a NaN stays a NaN. */
TS_INLINE bf16 bf16_from_float(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (f != f) return (bf16)((bits >> 16) | 0x40);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

TS_INLINE v16f v_load_bf16(const bf16 *p) {
#ifdef TS_AVX512
    return (v16f)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
    v16h h;
    memcpy(&h, p, sizeof h);
    return (v16f)(__builtin_convertvector(h, v16u) << 16);
#endif
}

TS_INLINE v16f v_load_int8(const int8_t *p) {
#ifdef TS_AVX512
    return (v16f)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#else
    v16b b;
    memcpy(&b, p, sizeof b);
    v16s s = __builtin_convertvector(b, v16s); /* in two steps: gcc 12 does the whole way lane by lane */
    return __builtin_convertvector(__builtin_convertvector(s, v16i), v16f);
#endif
}

TS_INLINE void v_store_bf16(bf16 *p, v16f v) {
    v16u bits = (v16u)v;
    v16u rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    v16u quiet = (bits >> 16) | 0x40;
    v16i nan = v != v;
    v16h h = __builtin_convertvector((quiet & (v16u)nan) | (rounded & ~(v16u)nan), v16h);
    memcpy(p, &h, sizeof h);
}

TS_INLINE float v_sum(v16f v) {
#ifdef TS_AVX512
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s[16];
    v_store(s, v);
    for (int width = 8; width >= 1; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
#endif
}

TS_INLINE float v_largest(v16f v) {
#ifdef TS_AVX512
    return _mm512_reduce_max_ps((__m512)v);
#else
    float s[16];
    v_store(s, v);
    for (int width = 8; width >= 1; width /= 2)
        for (int i = 0; i < width; i++) s[i] = s[i] > s[i + width] ? s[i] : s[i + width];
    return s[0];
#endif
}

/* Lane i of the result is the sum of a[i]: sixteen horizontal sums for about three instructions each. */
TS_INLINE v16f v_sum16(const v16f *a) {
#ifdef TS_AVX512
    __m512 quad[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512 a0 = (__m512)a[4 * i], a1 = (__m512)a[4 * i + 1], a2 = (__m512)a[4 * i + 2], a3 = (__m512)a[4 * i + 3];
        __m512 s01 = _mm512_add_ps(_mm512_unpacklo_ps(a0, a1), _mm512_unpackhi_ps(a0, a1)); /* per 128 bits: 0 1 0 1 */
        __m512 s23 = _mm512_add_ps(_mm512_unpacklo_ps(a2, a3), _mm512_unpackhi_ps(a2, a3));
        quad[i] = _mm512_add_ps(_mm512_shuffle_ps(s01, s23, 0x44), _mm512_shuffle_ps(s01, s23, 0xee)); /* 0 1 2 3 */
    }
    /* quad[i] holds, in each of its four 128-bit parts, partial sums of a[4i..4i+3]: add the parts, one quad to a part. */
    __m512 q01 = _mm512_add_ps(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88), _mm512_shuffle_f32x4(quad[0], quad[1], 0xdd));
    __m512 q23 = _mm512_add_ps(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88), _mm512_shuffle_f32x4(quad[2], quad[3], 0xdd));
    return (v16f)_mm512_add_ps(_mm512_shuffle_f32x4(q01, q23, 0x88), _mm512_shuffle_f32x4(q01, q23, 0xdd));
#else
    float s[16];
    for (int i = 0; i < 16; i++) s[i] = v_sum(a[i]);
    return v_load(s);
#endif
}

/* e^x to about 2 ulp; clamped to the normal range, so -inf gives about 1e-38 and callers mask instead. NaN stays NaN. */
TS_INLINE v16f v_exp(v16f x) {
    const v16f low = v_set(-87.0f), high = v_set(88.0f), magic = v_set(12582912.0f); /* 1.5 * 2^23: rounds to an integer */
    x = v_select(x < low, low, x);
    x = v_select(x > high, high, x);
    v16f shifted = x * v_set(1.44269504f) + magic;
    v16f n = shifted - magic;
    v16f r = x - n * v_set(0.693359375f) + n * v_set(2.12194440e-4f); /* ln 2 in two parts (Cody and Waite 1980) */
    v16f p = v_set(1.9875691500e-4f);
    p = p * r + v_set(1.3981999507e-3f);
    p = p * r + v_set(8.3334519073e-3f);
    p = p * r + v_set(4.1665795894e-2f);
    p = p * r + v_set(1.6666665459e-1f);
    p = p * r + v_set(5.0000001201e-1f);
    p = p * r * r + r + v_set(1.0f);
    v16i scale = ((v16i)shifted << 23) + (v16i)v_set(1.0f); /* the integer n sits in the low bits of `shifted` */
    return p * (v16f)scale;
}

/* Half precision -> float, exact (subnormals and infinities included). */
TS_INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, bits = h & 0x7fff;
    float f;
    if (bits >= 0x7c00) {
        bits = sign | 0x7f800000 | ((bits & 0x3ff) << 13);
    } else if (bits >= 0x400) {
        bits = sign | ((bits << 13) + 0x38000000);
    } else {
        f = (float)bits * 5.9604644775390625e-8f; /* 2^-24 */
        memcpy(&bits, &f, 4);
        bits |= sign;
    }
    memcpy(&f, &bits, 4);
    return f;
}

TS_INLINE v16f v_load_half(const uint16_t *p) {
#ifdef TS_AVX512
    return (v16f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    v16h h;
    memcpy(&h, p, sizeof h);
    v16u u = __builtin_convertvector(h, v16u);
    v16u sign = (u & 0x8000) << 16, bits = u & 0x7fff;
    v16f normal = (v16f)((bits << 13) + 0x38000000);
    v16f small = __builtin_convertvector((v16i)bits, v16f) * v_set(5.9604644775390625e-8f);
    v16f special = (v16f)(((bits & 0x3ff) << 13) | 0x7f800000);
    v16f f = v_select((v16i)(bits < 0x400), small, v_select((v16i)(bits >= 0x7c00), special, normal));
    return (v16f)((v16u)f | sign);
#endif
}

/* Float -> half precision, nearest even; beyond the range gives infinity. */
TS_INLINE uint16_t half_from_float(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and above */
    if (bits < 0x38800000) {                                  /* below 2^-14: a subnormal; let the adder round */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f; /* one unit in the last place of 0.5 is 2^-24 */
        memcpy(&bits, &magnitude, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    bits += 0xc8000fff + ((bits >> 13) & 1);
    return (uint16_t)(sign | (bits >> 13));
}

/* Entry i of the table for the low four bits of each lane, whatever the upper bits hold. */
TS_INLINE v16f v_lookup16(v16f table, v16u index) {
#ifdef TS_AVX512
    return (v16f)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
#else
    /* The tables used are i + table[0]: arithmetic beats a gather. */
    return __builtin_convertvector((v16i)(index & 15), v16f) + v_set(table[0]);
#endif
}

#endif
