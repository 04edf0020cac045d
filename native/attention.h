/* Paged attention on CPU: one layer of one step, with strided input and output rows, over a pool of blocks.
 *
 *     pool     [block][offset][kv head][dim]; a slot is block * block_size + offset
 *     step     sequence i has the rows query_ends[i-1] .. query_ends[i], its newest tokens, and kv_lengths[i] keys,
 *              including those rows'; a query sees the keys up to its own (window > 0: the last `window` of those)
 *
 *     one thread        attention_prepare
 *     every thread      attention_write (a share of the new tokens)
 *                       -- barrier --
 *     every thread      attention_work (claims pieces until none is left)
 *                       -- barrier before the output is read --
 *
 * Scores, softmax and sums are float32. Keys are processed in partitions that begin at fixed positions and are merged in
 * order, so a row's result depends only on its own sequence: not on other rows, the threads, or whether it is computed
 * alone or in a chunk.
 */

#ifndef NATIVE_ATTENTION_H
#define NATIVE_ATTENTION_H

#include <stdint.h>

#include "threads.h"

enum attention_dtype { ATTENTION_F32, ATTENTION_BF16 };

enum { ATTENTION_MAX_DIM = 256, ATTENTION_DIM_STEP = 8 };

/* Return values of the entry points. */
enum attention_error { ATTENTION_OK, ATTENTION_NO_MEMORY, ATTENTION_BAD_SHAPE, ATTENTION_BAD_BLOCK };

/* A step's sequences. `blocks` has the tables one after another: sequence i's are table_ends[i-1] .. table_ends[i]. */
struct attention_step {
    int32_t num_sequences, num_tokens, block_size, num_blocks; /* num_blocks: size of the pool */
    const int32_t *query_ends, *kv_lengths;                    /* [num_sequences] */
    const int32_t *table_ends, *blocks;                        /* [num_sequences], [table_ends[last]] */
    const int64_t *slots;                                      /* [num_tokens]: slots of the new tokens' KV */
};

/* [num_tokens][heads][dim] in any order of the first two; strides count elements. */
struct attention_rows {
    void *base;
    int64_t row_stride, head_stride;
    int32_t dtype, unused;
};

struct attention_layer {
    const struct attention_step *step;
    void *keys, *values; /* the layer's pools, both of pool_dtype */
    struct attention_rows query, new_keys, new_values, output;
    const float *sinks; /* [num_heads], or NULL */
    int32_t pool_dtype, num_heads, num_kv_heads, key_dim, value_dim;
    int32_t window; /* 0: all keys */
    float scale;
    float softcap; /* 0: none */
};

/* Bytes of struct attention_step, attention_rows and attention_layer, which native/attention.py mirrors. */
extern const uint32_t attention_struct_sizes[];

/* Scratch memory for the threads of one team, and the plan of the current layer. */
struct attention;

/* Returns NULL if out of memory. `threads` must outlive it, and determines thread count and instructions. */
struct attention *attention_open(struct threads *threads);

void attention_close(struct attention *attention);

/* Check and plan a layer, before the threads start. The layer's struct must stay valid until they are done. */
int attention_prepare(struct attention *attention, const struct attention_layer *layer);

/* Copy this thread's share of the new keys and values into the pool; all of them if count is 1. */
void attention_write(const struct attention_layer *layer, int thread, int count);

/* Compute attention until all items of the prepared layer are claimed. */
void attention_work(struct attention *attention, int thread);

/* The same as complete calls, for callers outside a parallel region. Return enum attention_error. */
enum { ATTENTION_WRITE = 1, ATTENTION_ATTEND = 2 };
int attention_run(struct attention *attention, const struct attention_layer *layer, int what);

#endif
