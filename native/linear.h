/* Products of rows with weights that are packed once, and the operations on rows between them.
 *
 * Weights, [n][k] in a checkpoint, are packed into pairs of panels, 32 columns of the product in one stream of bytes:
 *
 *     float32    [n/32][k][32]
 *     bfloat16   [n/32][k/2][2 panels][16 columns][2]   one 64-byte line holds 16 columns of two k
 *
 * Columns past n are zeros; of bfloat16 k is even. Rows are float32 at any stride or, where the kernel says so,
 * bfloat16 with zeros up to a multiple of 32; where the model computes in bfloat16 float32 rows hold such values too,
 * so the sums (float32, in the order of k) are of exact products. A row's result depends neither on the number of other
 * rows nor on that of threads.
 */

#ifndef NATIVE_LINEAR_H
#define NATIVE_LINEAR_H

#include <stddef.h>
#include <stdint.h>

#include "isa.h"

enum { PAIR = 32, PANEL = 16, MAX_TILE_ROWS = 32, BLOCK_ROWS = 96 };
enum { FORMAT_FLOAT32 = 0, FORMAT_BFLOAT16 = 1 };

/* The operation on a product before it is stored. */
enum finish {
    FINISH_STORE,    /* out = product */
    FINISH_ADD,      /* out = out + product */
    FINISH_GATED_SILU /* panels are gate, up, gate, up ...: out = silu(gate) * up, half as many columns */
};

/* Packed weights; the caller owns the memory. `bias` has `n` rounded up to 32 floats, in the panels' order. */
struct linear {
    const void *weights;
    const float *bias; /* or NULL */
    uint32_t k, n, format, finish;
};

/* One instruction set's functions. `rounded`: every value transformers would keep in bfloat16 is rounded to it. */
struct linear_kernel {
    uint32_t row_format, tile_rows, row_unit; /* row_unit: rows that are always computed together */
    void (*begin)(void), (*end)(void); /* called before and after a thread's tiles; or NULL */
    /* Columns of pair `pair` for `num_rows` <= tile_rows rows: the sums, stored [num_rows][PAIR]. */
    void (*tile)(const struct linear *, size_t pair, const void *rows, size_t stride, unsigned num_rows, float *sums);
    void (*finish)(const struct linear *, size_t pair, const float *sums, unsigned num_rows, float *out,
                   size_t out_stride, int rounded);
    /* out = weight * (row / rms(row)); `size` is a multiple of 16 with zeros past `true_size`. */
    void (*norm)(const float *row, const float *weight, float *out, size_t size, size_t true_size, float epsilon,
                 int rounded);
    /* Rotate one head in place: `cosine` and `sine` have `size` / 2 values. */
    void (*rotate)(float *head, const float *cosine, const float *sine, size_t size, int rounded);
    void (*add)(float *row, const float *other, size_t size, int rounded); /* `size`: a multiple of 16 */
    void (*narrow)(uint16_t *to, const float *from, size_t size);          /* float32 to bfloat16 */
};

enum { KERNEL_PLAIN, KERNEL_AVX2, KERNEL_AVX512, KERNEL_AVX512_BF16, KERNEL_AMX, NUM_LINEAR_KERNELS };

/* Kernel `number`; NULL if this CPU does not support it. Those from AVX512_BF16 on need rows in bfloat16, and AMX reads
 * MAX_TILE_ROWS rows from any first row, so there must be memory after the last row. */
const struct linear_kernel *linear_kernel_number(unsigned number);

/* The best kernel for weights of `format` up to the instructions `isa` (AVX512_BF16 includes AMX). */
const struct linear_kernel *linear_kernel_of(enum isa isa, uint32_t format);

/* The instructions with the fastest bfloat16 products on this CPU. */
uint32_t native_best_isa(void);

/* Pack panels [start, end) of `columns` weight rows, [columns][k], into `packed`.
 *
 * Panel p goes to panel first + p * step: a step of 1 fills one after another, 2 every second one (gate and up).
 * `source` is float32 or bfloat16 as `format` says. Columns past `columns` in the last panel are zeros.
 */
struct packing {
    void *packed;
    const void *source;
    uint32_t columns, k, first, step, format;
};
void linear_pack(const struct packing *packing, size_t start, size_t end);

/* Unpack weight row `column`, k floats: a token's embedding if both are the same tensor. */
void linear_unpack_row(const struct linear *linear, size_t column, float *row);

/* Thread `thread` of `num_threads` computes its part of `out` = finish(rows x weights); `stride` counts row items. */
void linear_run(const struct linear *linear, const struct linear_kernel *kernel, const void *rows, size_t stride,
                size_t num_rows, float *out, size_t out_stride, int rounded, unsigned thread, unsigned num_threads);

#endif
