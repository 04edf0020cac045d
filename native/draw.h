/* Draw one column of each row by its scores: temperature, top_k, top_p and min_p, in this order, then one number.
 *
 *     scaled = (score - largest) / temperature      weight = exp(scaled), in double, rounded to float
 *     top_k, top_p and min_p say from which scaled score on weights count; the others weigh nothing
 *     the first column up to which more than uniform(seed, sequence, position) of all weight lies
 *
 * What engine/sampling/sampler.py does with tensors; equal for every instruction set and number of threads.
 */

#ifndef NATIVE_DRAW_H
#define NATIVE_DRAW_H

#include <stddef.h>

#include "threads.h"

/* One draw. No limit: top_k 0, top_p 2, min_p 0. Packed by engine/sampling/native_chooser.py. */
struct draw {
    uint64_t seed, sequence, position;
    float temperature, top_p, min_p;
    uint32_t top_k, row, unused;
};

/* Write to columns[i] what draws[i] takes of its row; of a row that has NaN, inf or nothing but -inf, some column.
 * `rows` has `num_columns`, 1 or more, and `stride` floats from row to row. Returns 0; 1 where there is no memory. */
int draw_from_rows(struct threads *threads, const float *rows, size_t num_columns, size_t stride,
                   const struct draw *draws, size_t num_draws, int64_t *columns);

#endif
