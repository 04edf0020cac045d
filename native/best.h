/* The best column of each row, for greedy sampling. */

#ifndef NATIVE_BEST_H
#define NATIVE_BEST_H

#include <stddef.h>

#include "threads.h"

/* Write each row's largest score, and the first column that has it, to scores[row] and columns[row]; for a row with NaN
 * its first NaN. `rows` is [num_rows][num_columns], rows `stride` floats apart; num_columns is 1 or more. */
void best_of_rows(struct threads *threads, const float *rows, size_t num_rows, size_t num_columns, size_t stride,
                  int64_t *columns, float *scores);

#endif
