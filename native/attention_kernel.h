/* What one instruction set brings to attention: the loops over numbers. attention_kernel.c has them. */

#ifndef NATIVE_ATTENTION_KERNEL_H
#define NATIVE_ATTENTION_KERNEL_H

#include <string.h>

#include "attention.h"

enum { TILE = 64, LANES_MAX = 16 }; /* keys taken at once; the widest vector in floats */

/* To the nearest, a tie to the even one. */
static inline uint16_t round_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0; /* not a number */
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

static inline float widen_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* The softmax of some rows over the keys so far: exp(score - max) summed, and its product with the values. */
struct softmax {
    float *max, *sum; /* [rows] */
    float *output;    /* [rows][padded value dim] */
};

/* Which keys of a tile row r sees: [low[r], high[r]). */
struct sight {
    const int32_t *low, *high;
};

struct attention_kernel {
    int lanes;
    /* to [dim][TILE] = the keys at base + offsets[i] (bytes) of `dtype`; those from `count` on are 0 */
    void (*pack_keys)(float *to, const char *base, const int64_t *offsets, int count, int dim, int dtype);
    /* to [count][padded] = the values there, 0 from `dim` on */
    void (*expand_values)(float *to, const char *base, const int64_t *offsets, int count, int dim, int padded,
                          int dtype);
    /* c [rows][columns] = a [rows][depth] x b [depth][columns], added to c where `add`; `columns` fills vectors */
    void (*product)(float *c, int c_stride, const float *a, int a_stride, const float *b, int b_stride, int rows,
                    int columns, int depth, int add);
    /* scores [rows][TILE] -> exp(score - max), 0 where a row sees nothing; `state` is brought to the new max */
    void (*soften)(float *scores, const struct softmax *state, struct sight sight, int rows, int padded,
                   float softcap, int first);
    /* state = state and then part, row by row */
    void (*merge)(const struct softmax *state, const struct softmax *part, int rows, int padded);
    /* to [dim] of `dtype` = output / sum of row `row`; the sink, if there is one, is part of the sum */
    void (*finish)(void *to, int dtype, const struct softmax *state, int row, int dim, int padded, const float *sink);
    /* to [dim] = from [dim] of `dtype`, times scale */
    void (*load_query)(float *to, const void *from, int dtype, int dim, float scale);
};

/* The kernel for one instruction set; AVX512_BF16 has AVX512's. */
const struct attention_kernel *attention_kernel_of(enum isa isa);

#endif
