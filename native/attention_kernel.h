/* The numeric loops of attention for one instruction set; defined in attention_kernel.c. */

#ifndef NATIVE_ATTENTION_KERNEL_H
#define NATIVE_ATTENTION_KERNEL_H

#include <string.h>

#include "attention.h"

enum {
    TILE = 64,        /* keys processed at once */
    FETCHED_A_ROW = 6 /* rows of the next tile that are prefetched during the softmax of one row */
};

/* The right factor of a product: contiguous rows of floats, or scattered rows of some dtype. */
enum right_kind { RIGHT_MATRIX, RIGHT_F32, RIGHT_BF16 };

/* Round to nearest, ties to even. */
static inline uint16_t round_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0; /* NaN */
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

/* Rows of one head in a pool, at base + offsets[i] (bytes). */
struct pool_rows {
    const char *base;
    const int64_t *offsets;
    int32_t bytes, count;
};

/* The next data: prefetched little by little during the current work. */
struct ahead {
    struct pool_rows keys, values;
};

/* Prefetch one more row; return 0 if none is left. */
static inline int fetch_row(struct ahead *ahead) {
    struct pool_rows *rows = ahead->keys.count > 0 ? &ahead->keys : &ahead->values;
    if (rows->count == 0) return 0;
    const char *row = rows->base + rows->offsets[--rows->count];
    for (int32_t at = 0; at < rows->bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
    return 1;
}

struct attention_kernel {
    int lanes, score_keys; /* keys that `score` processes at once */
    /* scores [rows][TILE] = query [rows][dim] x unpacked keys, up to six rows; the same bits as with pack_keys and
     * product */
    void (*score)(float *scores, const float *query, struct pool_rows keys, int dim, int dtype, int rows,
                  struct ahead *ahead);
    /* to [dim][TILE] = the keys in `rows`, all of them; whole vectors */
    void (*pack_keys)(float *to, struct pool_rows rows, int dim, int dtype, struct ahead *ahead);
    /* to [count][padded] = the values in `rows`, 0 from `dim` on */
    void (*expand_values)(float *to, struct pool_rows rows, int dim, int padded, int dtype);
    /* c [rows][columns] = a [rows][depth] x b [depth][columns], added to c if `add`; `columns` fills vectors */
    void (*product)(float *c, int c_stride, const float *a, int a_stride, const float *b, int b_stride, int rows,
                    int columns, int depth, int add, struct ahead *ahead);
    /* the same with unpacked rows of b; `dim` fills vectors */
    void (*product_in_place)(float *c, int c_stride, const float *a, int a_stride, struct pool_rows b, int dtype,
                             int rows, int dim, int add, struct ahead *ahead);
    /* scores [rows][TILE] -> exp(score - max), 0 for keys a row does not see; `state` is rescaled to the new max */
    void (*soften)(float *scores, const struct softmax *state, struct sight sight, int rows, int padded, float softcap,
                   int first, struct ahead *ahead);
    /* merge `part` into `state`, row by row */
    void (*merge)(const struct softmax *state, const struct softmax *part, int rows, int padded);
    /* to [dim] of `dtype` = output / sum of row `row`; the sum includes the sink, if there is one */
    void (*finish)(void *to, int dtype, const struct softmax *state, int row, int dim, int padded, const float *sink);
    /* to [dim] = from [dim] of `dtype`, times scale */
    void (*load_query)(float *to, const void *from, int dtype, int dim, float scale);
};

/* The kernel for one instruction set; AVX512_BF16 has AVX512's. */
const struct attention_kernel *attention_kernel_of(enum isa isa);

#endif
