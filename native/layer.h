/* Decoder layers of the Llama family, run as a short program of operations by a team of threads.
 *
 *     x [rows][hidden] --ENTER: norm, q k v, head norms, rotation, KV write--> q --[NOTIFY]--ATTEND--> attended
 *       --OUT: output product--> x --MLP: norm, gate and up, silu, down--> x ... --HEAD: norm, logits of chosen rows
 *
 * Values are float32; with `rounded` each one that transformers keeps in bfloat16 is rounded to it. With `partial`
 * OUT and MLP store their product in `step.partial` (a rank's share, to be summed over the ranks), and ADD adds it.
 * The caller owns all memory. Structs are mirrored in engine/fused/structs.py, which compares their sizes.
 */

#ifndef NATIVE_LAYER_H
#define NATIVE_LAYER_H

#include "attention.h"
#include "linear.h"
#include "threads.h"

enum operation { OP_ENTER, OP_NOTIFY, OP_ATTEND, OP_OUT, OP_MLP, OP_ADD, OP_HEAD, NUM_OPERATIONS };

struct instruction {
    uint32_t operation, layer;
};

/* One layer's weights and its part of the pool. Norm weights have `hidden` rounded up to 16 floats. */
struct layer {
    struct linear qkv, out, gate_up, down;
    const float *input_norm, *post_norm, *query_norm, *key_norm; /* the last two may be NULL */
    void *keys, *values; /* [num_slots][kv_heads][head_dim] */
    float scale, softcap; /* of attention.h, as are these */
    int32_t window, padding;
};

/* Values shared by all layers. Queries begin at column 0 of a row of `qkv`, keys and values at the given columns. */
struct decoder {
    const struct layer *layers;
    const float *final_norm;
    struct linear head;
    uint32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, key_column, value_column;
    uint32_t rounded, partial, pool_format, num_slots;
    float epsilon;
};

/* One step's memory; strides in items. `scratch` and `narrow` have `passing_rows`: no fewer than count * SCRATCH_ROWS,
 * `num_rows` and `num_samples`, which may be more than the rows. `narrow` has MAX_TILE_ROWS behind them; its stride is
 * that of the widest row, up to a multiple of 32. */
struct step {
    uint32_t num_rows, num_samples, num_positions; /* of the tables of angles */
    uint32_t hidden_stride, qkv_stride, attended_stride, inner_stride, logits_stride,
        narrow_stride, passing_rows;
    float *x, *scratch, *qkv, *attended, *inner, *partial, *logits;
    uint16_t *narrow; /* rows in bfloat16 for kernels that need them */
    const float *cosine, *sine; /* [positions][head_dim / 2] */
    const int64_t *positions, *slots, *sample_rows;
    struct attention *attention;             /* these two are only for ATTEND */
    const struct attention_step *sequences;
    void (*notify)(uint32_t layer); /* called in the caller's thread, between the layer's KV write and its attention */
};

enum { SCRATCH_ROWS = 16 };

enum decoder_error { DECODER_OK, DECODER_BAD_PROGRAM, DECODER_BAD_INDEX, DECODER_ATTENTION };

/* Bytes of struct linear, packing, layer, decoder, step and instruction. */
extern const uint32_t decoder_struct_sizes[];

/* Run `count` instructions in order. Returns enum decoder_error: an unknown operation or layer, a decoder without
 * layers, ATTEND without attention for all rows, a slot, position or row outside its table, or DECODER_ATTENTION plus
 * an error of attention_prepare. */
int decoder_run(struct threads *threads, const struct decoder *decoder, const struct step *step,
                const struct instruction *instructions, size_t count);

/* Pack weights with all threads. */
void decoder_pack(struct threads *threads, const struct packing *packing);

/* Write the embeddings of `tokens`, each below head->n, from the packed `head` into rows of x. Returns enum
 * decoder_error. */
int decoder_embed(struct threads *threads, const struct linear *head, const int64_t *tokens, size_t num_rows, float *x,
                   size_t stride);

#endif
