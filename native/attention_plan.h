/* How a layer's attention is split into items that threads claim, and the memory they need. */

#ifndef NATIVE_ATTENTION_PLAN_H
#define NATIVE_ATTENTION_PLAN_H

#include <stdatomic.h>

#include "attention_kernel.h"

/* Keys [p * PART, (p + 1) * PART) are partition p of every sequence: a row's result is that of its partitions, merged
 * in order, by whichever threads computed them. A chunk is split into query tiles of about ROWS rows (queries x heads
 * of a group). */
enum { PART = 2 * TILE, ROWS = 64 };

/* Some queries of one sequence, some of its KV heads, some partitions. */
struct item {
    int32_t sequence, head, num_heads, first_query, num_queries, first_part, end_part;
    int32_t group; /* -1: the item has all partitions; else the group with the other ones */
};

/* Items with the same rows: each stores its partitions' softmax, and the last one merges them. */
struct group {
    _Atomic int left;
    int32_t first_part, num_parts;
    int64_t at; /* of the first partition, in floats of `partials` */
};

/* One thread's memory. */
struct scratch {
    float *query, *scores; /* [rows][key dim], [rows of a head][TILE] */
    float *keys, *values;  /* [key dim][TILE], [TILE][padded] */
    struct softmax state, part;            /* of all rows */
    int64_t *key_offsets, *value_offsets;  /* [2][TILE]: this tile's and the next one's */
    int32_t *low, *high;                   /* [rows of a head] */
};

struct attention {
    struct threads *threads;
    const struct attention_kernel *kernel;
    const struct attention_layer *layer;
    int32_t heads_a_group, padded, rows_max; /* padded: value_dim up to whole vectors */
    _Atomic int next;                        /* the next item to claim */
    struct item *items;
    struct group *groups;
    float *partials, *memory; /* memory: all threads' scratch */
    int64_t num_items, num_groups, num_partials, items_held, groups_held, partials_held, memory_held, scratch_floats;
};

/* Row `first_query` of the item's sequence: its row in the step, and its position. */
struct place {
    int32_t row, position;
};
struct place place_of(const struct attention_step *step, const struct item *item);

/* Floats that one partition of `rows` rows needs: max, sum, output. */
static inline int64_t softmax_floats(int64_t rows, int64_t padded) { return rows * (padded + 2); }

/* The softmax state of `rows` rows at address `at`. */
struct softmax softmax_at(float *at, int64_t rows);

/* The memory of thread `thread`. */
struct scratch scratch_of(const struct attention *attention, int thread);

#endif
