/* A row is read twice, the second time from a cache: for the largest score, then for its column.
 *
 * Scores are compared as integers in the same order: compilers vectorise that; for floats, NaN and signed zeros prevent
 * it.
 */

#include "best.h"

#include <string.h>

enum { BLOCK = 512 };     /* scores searched together */
enum { ALONE = 1 << 16 }; /* fewer scores are not worth a team */

#define INLINE static inline __attribute__((always_inline))

struct work {
    const float *rows;
    size_t num_rows, num_columns, stride;
    int64_t *columns;
    float *scores;
    enum isa isa;
};

/* An integer in the order of the scores; equal for both zeros, and the largest of all for NaN. */
INLINE int32_t rank_of(float score) {
    int32_t bits;
    memcpy(&bits, &score, sizeof bits);
    int32_t size = bits & INT32_MAX, sign = bits >> 31, is_nan = (0x7F800000 - size) >> 31; /* 0 or -1 */
    int32_t rank = (size ^ sign) - sign;
    return (rank & ~is_nan) | (is_nan & INT32_MAX);
}

INLINE int32_t largest(const float *row, size_t count) {
    int32_t most = INT32_MIN;
    for (size_t i = 0; i < count; i++) {
        int32_t rank = rank_of(row[i]);
        most = rank > most ? rank : most;
    }
    return most;
}

INLINE int stands_in(const float *row, size_t count, int32_t rank) {
    int found = 0;
    for (size_t i = 0; i < count; i++) found |= rank_of(row[i]) == rank;
    return found;
}

INLINE size_t best_in(const float *row, size_t count) {
    int32_t most = largest(row, count);
    size_t place = 0;
    while (place + BLOCK <= count && !stands_in(row + place, BLOCK, most)) place += BLOCK;
    while (rank_of(row[place]) != most) place++;
    return place;
}

static size_t best_plain(const float *row, size_t count) { return best_in(row, count); }

#if defined(__x86_64__)
TARGET_AVX2 static size_t best_avx2(const float *row, size_t count) { return best_in(row, count); }
TARGET_AVX512 static size_t best_avx512(const float *row, size_t count) { return best_in(row, count); }
#endif

static size_t best_by(enum isa isa, const float *row, size_t count) {
#if defined(__x86_64__)
    if (isa >= ISA_AVX512) return best_avx512(row, count);
    if (isa >= ISA_AVX2) return best_avx2(row, count);
#endif
    (void)isa;
    return best_plain(row, count);
}

static void best_part(void *context, int thread, int count) {
    const struct work *work = context;
    size_t row = work->num_rows * (size_t)thread / (size_t)count;
    size_t end = work->num_rows * ((size_t)thread + 1) / (size_t)count;
    for (; row < end; row++) {
        const float *scores = work->rows + row * work->stride;
        size_t place = best_by(work->isa, scores, work->num_columns);
        work->columns[row] = (int64_t)place;
        work->scores[row] = scores[place];
    }
}

void best_of_rows(struct threads *threads, const float *rows, size_t num_rows, size_t num_columns, size_t stride,
                  int64_t *columns, float *scores) {
    struct work work = {rows, num_rows, num_columns, stride, columns, scores, threads_isa(threads)};
    if (num_rows * num_columns <= ALONE)
        best_part(&work, 0, 1);
    else
        threads_run(threads, best_part, &work);
}
