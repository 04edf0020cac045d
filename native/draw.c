/* Sums are made of LANES partial sums in a fixed order and products are never fused, so vectors of any width give the
 * same bits. A filter's lowest kept score is found by counting scores by their bits, most significant ones first. */

#include "draw.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 16, BLOCK = 512 };          /* columns whose weights are summed together */
enum { NUM_LEVELS = 3, MAX_BINS = 1 << 11 };
enum { NOTHING = 0x7F800000 };             /* the magnitude of -inf */

#define INLINE static inline __attribute__((always_inline))

/* Working memory for one row: scaled scores as the bits of their magnitudes (all are 0 or below, so the smaller the
 * better), their weights, and the candidates left while the lowest kept score is searched. */
struct bench {
    uint32_t *sizes, *left_sizes;
    float *weights, *left_weights;
    double sums[MAX_BINS];
};

struct work {
    const float *rows;
    size_t num_columns, stride, num_draws;
    const struct draw *draws;
    int64_t *columns;
    int failed;
    enum isa isa;
};

typedef double doubles __attribute__((vector_size(64)));
typedef uint64_t longs __attribute__((vector_size(64)));
typedef float floats __attribute__((vector_size(32)));
enum { WIDTH = 8 };

/* GCC before 9 does not convert vectors. */
#if (defined(__clang__) || __GNUC__ >= 9) && !defined(WITHOUT_CONVERTVECTOR)
#define CONVERT(to, from) ((to) = __builtin_convertvector(from, __typeof__(to)))
#else
#define CONVERT(to, from) \
    for (int lane = 0; lane < WIDTH; lane++) (to)[lane] = (__typeof__((to)[0]))(from)[lane]
#endif

/* exp of each item, 0 or below, to about 1e-16, relative; 0 as a float where it is below -110. */
INLINE void power(doubles *items) {
    const double magic = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to an integer */
    static const double factors[] = {
        1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
        1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0,
    };
    const doubles least = (doubles){0} - 110.0;
    longs below = (longs)(*items < least);
    doubles x = (doubles)(((longs)least & below) | ((longs)*items & ~below));
    doubles shifted = x * 1.4426950408889634 + magic, whole = shifted - magic;
    doubles rest = (x - whole * 0.693147180369123816490) - whole * 1.90821492927058770002e-10; /* ln 2, in two parts */
    doubles sum = (doubles){0} + factors[0];
    for (int i = 1; i < 13; i++) sum = sum * rest + factors[i];
    *items = (doubles)((longs)sum + ((longs)shifted << 52));
}

INLINE float largest_of(const float *scores, size_t count) {
    float most[LANES];
    for (int lane = 0; lane < LANES; lane++) most[lane] = -INFINITY;
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            most[lane] = scores[i + lane] > most[lane] ? scores[i + lane] : most[lane];
    for (; i < count; i++) most[0] = scores[i] > most[0] ? scores[i] : most[0];
    for (int lane = 1; lane < LANES; lane++) most[0] = most[lane] > most[0] ? most[lane] : most[0];
    return most[0];
}

INLINE void weigh_some(const float *scores, size_t count, float best, float temperature, uint32_t *sizes,
                       float *weights) {
    floats some = {0};
    memcpy(&some, scores, count * sizeof *scores);
    some = (some - best) / temperature;
    doubles wide;
    CONVERT(wide, some);
    power(&wide);
    floats powers;
    CONVERT(powers, wide);
    memcpy(sizes, &some, count * sizeof *sizes);
    memcpy(weights, &powers, count * sizeof *weights);
}

INLINE void weigh(const float *scores, size_t count, float temperature, uint32_t *sizes, float *weights) {
    float best = largest_of(scores, count);
    size_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) weigh_some(scores + i, WIDTH, best, temperature, sizes + i, weights + i);
    if (i < count) weigh_some(scores + i, count - i, best, temperature, sizes + i, weights + i);
    for (i = 0; i < count; i++) sizes[i] &= INT32_MAX;
}

INLINE double total_of(const float *weights, size_t count) {
    double sums[LANES] = {0};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += (double)weights[i + lane];
    for (; i < count; i++) sums[0] += (double)weights[i];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return sums[0];
}

INLINE void drop(uint32_t edge, float least, size_t count, const uint32_t *sizes, float *weights) {
    for (size_t i = 0; i < count; i++) weights[i] = sizes[i] > edge || weights[i] < least ? 0.0f : weights[i];
}

/* The magnitude up to which, from the smallest on, the weights (or with `counts` the columns) sum to `needed`, with the
 * same rounding to float; the largest magnitude if they never do. */
static uint32_t edge_of(struct bench *bench, size_t count, float needed, int counts) {
    static const unsigned shifts[NUM_LEVELS] = {20, 9, 0}, widths[NUM_LEVELS] = {11, 11, 9};
    const uint32_t *sizes = bench->sizes;
    const float *weights = bench->weights;
    uint32_t edge = 0;
    double before = 0;
    for (int level = 0; level < NUM_LEVELS; level++) {
        uint32_t num_bins = 1u << widths[level], mask = num_bins - 1, bin = 0, last = 0;
        memset(bench->sums, 0, num_bins * sizeof *bench->sums);
        for (size_t i = 0; i < count; i++) {
            uint32_t own = sizes[i] >> shifts[level] & mask;
            bench->sums[own] += counts ? 1.0 : (double)weights[i];
            last = own > last ? own : last;
        }
        while (bin < last && (float)(before + bench->sums[bin]) < needed) before += bench->sums[bin++];
        edge |= bin << shifts[level];
        if (level + 1 == NUM_LEVELS) break;
        size_t left = 0;
        for (size_t i = 0; i < count; i++) {
            bench->left_sizes[left] = sizes[i];
            bench->left_weights[left] = weights[i];
            left += (sizes[i] >> shifts[level] & mask) == bin;
        }
        sizes = bench->left_sizes, weights = bench->left_weights, count = left;
    }
    return edge;
}

static uint64_t mixed(uint64_t state, uint64_t word) {
    uint64_t value = (state ^ word) + 0x9E3779B97F4A7C15;
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9;
    value = (value ^ value >> 27) * 0x94D049BB133111EB;
    return value ^ value >> 31;
}

/* As engine/sampling/counter_hash.py: 24 bits, exact in a float. */
static float uniform_of(const struct draw *draw) {
    uint64_t hash = mixed(mixed(mixed(0, draw->seed), draw->sequence), draw->position);
    return (float)(hash >> 40) / (float)(1 << 24);
}

/* The first column at which the running sum of weights exceeds `uniform` times their total. */
INLINE size_t column_at(const float *weights, size_t count, float uniform) {
    double reached = 0, all = 0; /* summed in the same order: in another order `all` may round to more */
    for (size_t i = 0; i < count; i += BLOCK) all += total_of(weights + i, count - i < BLOCK ? count - i : BLOCK);
    float total = (float)all, below = nextafterf(total, 0.0f);
    float target = uniform * total < below ? uniform * total : below; /* rounding must not pass the last column */
    size_t place = 0, last = count - 1;
    for (; place < count; place += BLOCK) {
        size_t size = count - place < BLOCK ? count - place : BLOCK;
        double sum = total_of(weights + place, size);
        if ((float)(reached + sum) > target) {
            for (size_t i = place; i < place + size; i++) {
                reached += (double)weights[i];
                if (weights[i] > 0.0f) last = i;
                if ((float)reached > target) return i;
            }
            return last; /* not reached, as these sums have another order: it is the last kept column */
        }
        reached += sum;
    }
    return last;
}

INLINE size_t draw_one(struct bench *bench, const float *scores, size_t count, const struct draw *draw) {
    weigh(scores, count, draw->temperature, bench->sizes, bench->weights);
    if (draw->top_k > 0 && draw->top_k < count)
        drop(edge_of(bench, count, (float)draw->top_k, 1), 0.0f, count, bench->sizes, bench->weights);
    uint32_t edge = NOTHING;
    if (draw->top_p < 2.0f) {
        float needed = draw->top_p * (float)total_of(bench->weights, count);
        edge = edge_of(bench, count, needed, 0);
    }
    if (edge < NOTHING || draw->min_p > 0.0f) drop(edge, draw->min_p, count, bench->sizes, bench->weights);
    return column_at(bench->weights, count, uniform_of(draw));
}

static size_t draw_plain(struct bench *bench, const float *scores, size_t count, const struct draw *draw) {
    return draw_one(bench, scores, count, draw);
}

#if defined(__x86_64__)
TARGET_AVX2 static size_t draw_avx2(struct bench *bench, const float *scores, size_t count, const struct draw *draw) {
    return draw_one(bench, scores, count, draw);
}

TARGET_AVX512 static size_t draw_avx512(struct bench *bench, const float *scores, size_t count,
                                        const struct draw *draw) {
    return draw_one(bench, scores, count, draw);
}
#endif

static size_t draw_by(enum isa isa, struct bench *bench, const float *scores, size_t count, const struct draw *draw) {
#if defined(__x86_64__)
    if (isa >= ISA_AVX512) return draw_avx512(bench, scores, count, draw);
    if (isa >= ISA_AVX2) return draw_avx2(bench, scores, count, draw);
#endif
    (void)isa;
    return draw_plain(bench, scores, count, draw);
}

static void draw_part(void *context, int thread, int count) {
    struct work *work = context;
    size_t number = work->num_draws * (size_t)thread / (size_t)count, size = work->num_columns * 4;
    size_t end = work->num_draws * ((size_t)thread + 1) / (size_t)count;
    if (number == end) return;
    struct bench *bench = malloc(sizeof *bench + 4 * size);
    if (bench == NULL) {
        __atomic_store_n(&work->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    bench->sizes = (uint32_t *)(bench + 1), bench->left_sizes = bench->sizes + work->num_columns;
    bench->weights = (float *)(bench->left_sizes + work->num_columns);
    bench->left_weights = bench->weights + work->num_columns;
    for (; number < end; number++) {
        const struct draw *draw = &work->draws[number];
        const float *scores = work->rows + draw->row * work->stride;
        work->columns[number] = (int64_t)draw_by(work->isa, bench, scores, work->num_columns, draw);
    }
    free(bench);
}

int draw_from_rows(struct threads *threads, const float *rows, size_t num_columns, size_t stride,
                   const struct draw *draws, size_t num_draws, int64_t *columns) {
    struct work work = {rows, num_columns, stride, num_draws, draws, columns, 0, threads_isa(threads)};
    threads_run(threads, draw_part, &work);
    return work.failed;
}
