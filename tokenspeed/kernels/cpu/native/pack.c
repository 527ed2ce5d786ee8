/* GGUF block types -> the tiles of matmul.c. Runs once at load; clear rather than fast.
 *
 * Every type here is `scale * code + minimum` over groups of 16 or 32 along a row. Codes are kept exactly. Scales and minima are kept in half
 * precision: exact for the plain types, whose own they are; for the K types the product of a half with a small integer is rounded, which is
 * 2^-11 relative, an eighth of a bf16 weight's rounding.
 */
#include "simd.h"
#include "ts.h"

typedef struct {
    int bits, group, has_min;
    int block, block_bytes; /* GGUF: elements and bytes a block */
} format;

enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, NUM_TYPES = 15 };

static const format formats[NUM_TYPES] = {
    [Q4_0] = {4, 32, 0, 32, 18},    [Q4_1] = {4, 32, 1, 32, 20},    [Q5_0] = {8, 32, 0, 32, 22},    [Q5_1] = {8, 32, 1, 32, 24},
    [Q8_0] = {8, 32, 0, 32, 34},    [Q2_K] = {4, 16, 1, 256, 84},   [Q3_K] = {4, 16, 0, 256, 110},  [Q4_K] = {4, 32, 1, 256, 144},
    [Q5_K] = {8, 32, 1, 256, 176},  [Q6_K] = {8, 16, 0, 256, 210},
};

typedef struct {
    int code[32]; /* 4 bit: 0..15; 8 bit: -128..127 */
    float scale, minimum;
} group;

static float half_at(const uint8_t *p) { return half_to_float((uint16_t)(p[0] | p[1] << 8)); }

static void plain_group(int type, const uint8_t *b, group *g) {
    const int has_min = formats[type].has_min;
    g->scale = half_at(b);
    g->minimum = has_min ? half_at(b + 2) : 0;
    b += has_min ? 4 : 2;
    if (type == Q8_0) {
        for (int i = 0; i < 32; i++) g->code[i] = (int8_t)b[i];
        return;
    }
    uint32_t high = 0;
    const int five = type == Q5_0 || type == Q5_1;
    if (five) {
        high = (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
        b += 4;
    }
    for (int i = 0; i < 32; i++) {
        int low = i < 16 ? b[i] & 15 : b[i - 16] >> 4;
        g->code[i] = low + (five ? (int)(high >> i & 1) * 16 - (type == Q5_0 ? 16 : 0) : 0);
    }
}

/* Q4_K and Q5_K: eight groups of 32; six-bit scales and minima packed in 12 bytes. */
static void k45_group(int type, const uint8_t *b, int j, group *g) {
    const uint8_t *packed = b + 4, *high = b + 16, *codes = type == Q5_K ? b + 48 : b + 16;
    int scale = j < 4 ? packed[j] & 63 : (packed[j + 4] & 15) | packed[j - 4] >> 6 << 4;
    int minimum = j < 4 ? packed[j + 4] & 63 : packed[j + 4] >> 4 | packed[j] >> 6 << 4;
    g->scale = half_at(b) * (float)scale;
    g->minimum = -half_at(b + 2) * (float)minimum;
    for (int i = 0; i < 32; i++) {
        uint8_t byte = codes[j / 2 * 32 + i];
        g->code[i] = (j & 1 ? byte >> 4 : byte & 15) + (type == Q5_K ? (high[i] >> j & 1) * 16 : 0);
    }
}

/* Sixteen groups of 16. In each half of 128 elements, quarter `quarter` takes two bits of each of 32 bytes. */
static void k236_group(int type, const uint8_t *b, int j, group *g) {
    int half = j / 8, quarter = j % 8 / 2, first = j % 2 * 16;
    g->minimum = 0;
    if (type == Q2_K) {
        g->scale = half_at(b + 80) * (float)(b[j] & 15);
        g->minimum = -half_at(b + 82) * (float)(b[j] >> 4);
        for (int i = 0; i < 16; i++) g->code[i] = b[16 + 32 * half + first + i] >> (2 * quarter) & 3;
    } else if (type == Q3_K) {
        const uint8_t *packed = b + 96;
        int scale = (j < 8 ? packed[j] & 15 : packed[j - 8] >> 4) | (packed[8 + j % 4] >> (2 * (j / 4)) & 3) << 4;
        g->scale = half_at(b + 108) * (float)(scale - 32);
        for (int i = 0; i < 16; i++) {
            int low = b[32 + 32 * half + first + i] >> (2 * quarter) & 3;
            int set = b[first + i] >> (4 * half + quarter) & 1;
            g->code[i] = low + (set ? 8 : 4); /* 8 is this layout's zero */
        }
    } else {
        g->scale = half_at(b + 208) * (float)(int8_t)b[192 + j];
        for (int i = 0; i < 16; i++) {
            uint8_t byte = b[64 * half + quarter % 2 * 32 + first + i];
            int low = quarter < 2 ? byte & 15 : byte >> 4;
            int high = b[128 + 32 * half + first + i] >> (2 * quarter) & 3;
            g->code[i] = (low | high << 4) - 32;
        }
    }
}

static void read_group(int type, const uint8_t *row, long index, group *g) {
    const format *f = &formats[type];
    long in_block = f->block / f->group;
    const uint8_t *block = row + index / in_block * f->block_bytes;
    if (f->block == 32)
        plain_group(type, block, g);
    else if (type == Q4_K || type == Q5_K)
        k45_group(type, block, (int)(index % in_block), g);
    else
        k236_group(type, block, (int)(index % in_block), g);
}

/* Facts about a GGML type for a weight with `in` columns: bits, group, has_min, bytes of a GGUF row, bytes of a tile. 0 when it has no tiles. */
int ts_format(int type, long in, long facts[5]) {
    if (type < 0 || type >= NUM_TYPES || !formats[type].bits || in % formats[type].block) return 0;
    const format *f = &formats[type];
    long head = ts_ceil_div(in / f->group * 32 * (1 + f->has_min), 64) * 64;
    facts[0] = f->bits;
    facts[1] = f->group;
    facts[2] = f->has_min;
    facts[3] = in / f->block * f->block_bytes;
    facts[4] = head + in * 2 * f->bits;
    return 1;
}

/* raw: GGUF rows [out][row bytes] -> tiles, ceil(out / 16) of them, zeroed by the caller. */
void ts_pack(int type, const uint8_t *raw, long in, long out, uint8_t *tiles) {
    long facts[5];
    if (!ts_format(type, in, facts)) return;
    const format *f = &formats[type];
    long groups = in / f->group, head = facts[4] - in * 2 * f->bits;
    for (long n = 0; n < out; n++) {
        uint8_t *tile = tiles + n / 16 * facts[4];
        uint16_t *scales = (uint16_t *)tile, *minima = scales + groups * 16;
        long lane = n % 16;
        for (long index = 0; index < groups; index++) {
            group g;
            read_group(type, raw + n * facts[3], index, &g);
            scales[index * 16 + lane] = half_from_float(g.scale);
            if (f->has_min) minima[index * 16 + lane] = half_from_float(g.minimum);
            for (long i = 0; i < f->group; i++) {
                long k = index * f->group + i;
                if (f->bits == 4)
                    ((uint32_t *)(tile + head))[k / 8 * 16 + lane] |= (uint32_t)g.code[i] << (4 * (k % 8));
                else
                    ((int8_t *)(tile + head))[k * 16 + lane] = (int8_t)g.code[i];
            }
        }
    }
}
