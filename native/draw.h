/* Draw one column of each row by its scores: temperature, top_k, top_p and min_p, in this order, then one number.
 *
 *     scaled = (score - largest) / temperature      weight = exp(scaled), in double, rounded to float
 *     top_k, top_p and min_p set the lowest scaled score kept; the other weights are 0
 *     the result is the first column at which the running sum exceeds uniform(seed, sequence, position) * total
 *
 * The same algorithm as engine/sampling/sampler.py; results are equal for every instruction set and thread count.
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

/* Write the column drawn by draws[i] to columns[i]; an arbitrary column for a row with NaN, inf or only -inf.
 * `rows` has `num_columns`, 1 or more, and `stride` floats from row to row. Returns 0, or 1 if out of memory. */
int draw_from_rows(struct threads *threads, const float *rows, size_t num_columns, size_t stride,
                   const struct draw *draws, size_t num_draws, int64_t *columns);

#endif
