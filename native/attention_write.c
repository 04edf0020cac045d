#include <stdatomic.h>
#include <string.h>

#include "attention_plan.h"

enum { TOKENS_A_CLAIM = 64 };

/* Copy `dim` numbers from one dtype to another. */
static void convert(char *to, int to_dtype, const char *from, int from_dtype, int dim) {
    if (to_dtype == from_dtype) {
        memcpy(to, from, (size_t)dim * (to_dtype == ATTENTION_BF16 ? 2 : 4));
        return;
    }
    for (int i = 0; i < dim; i++) {
        if (to_dtype == ATTENTION_BF16)
            ((uint16_t *)to)[i] = round_to_bf16(((const float *)from)[i]);
        else
            ((float *)to)[i] = widen_bf16(((const uint16_t *)from)[i]);
    }
}

static void write_tokens(const struct attention_layer *layer, int32_t token, int32_t end) {
    const struct attention_rows *sources[] = {&layer->new_keys, &layer->new_values};
    char *const pools[] = {layer->keys, layer->values};
    const int32_t dims[] = {layer->key_dim, layer->value_dim};
    for (; token < end; token++)
        for (int which = 0; which < 2; which++) {
            const struct attention_rows *rows = sources[which];
            const size_t pool_size = layer->pool_dtype == ATTENTION_BF16 ? 2 : 4;
            const size_t size = rows->dtype == ATTENTION_BF16 ? 2 : 4;
            const size_t head_bytes = (size_t)dims[which] * pool_size;
            char *to = pools[which] + (size_t)layer->step->slots[token] * (size_t)layer->num_kv_heads * head_bytes;
            for (int32_t head = 0; head < layer->num_kv_heads; head++, to += head_bytes) {
                int64_t at = token * rows->row_stride + head * rows->head_stride;
                convert(to, layer->pool_dtype, (const char *)rows->base + at * (int64_t)size, rows->dtype, dims[which]);
            }
        }
}

void attention_write(const struct attention_layer *layer, int thread, int count) {
    const int64_t tokens = layer->step->num_tokens;
    write_tokens(layer, (int32_t)(tokens * thread / count), (int32_t)(tokens * (thread + 1) / count));
}

struct writing {
    const struct attention_layer *layer;
    _Atomic int next;
};

static void write_region(void *context, int thread, int count) {
    struct writing *writing = context;
    const int32_t tokens = writing->layer->step->num_tokens;
    (void)thread, (void)count;
    for (int32_t token; (token = atomic_fetch_add(&writing->next, TOKENS_A_CLAIM)) < tokens;)
        write_tokens(writing->layer, token, token + TOKENS_A_CLAIM < tokens ? token + TOKENS_A_CLAIM : tokens);
}

static void work_region(void *context, int thread, int count) {
    (void)count;
    attention_work(context, thread);
}

int attention_run(struct attention *attention, const struct attention_layer *layer, int what) {
    int error = attention_prepare(attention, layer);
    if (error != ATTENTION_OK) return error;
    if (what & ATTENTION_WRITE) {
        struct writing writing = {layer, 0};
        if (layer->step->num_tokens <= TOKENS_A_CLAIM)
            write_region(&writing, 0, 1);
        else
            threads_share(attention->threads, write_region, &writing);
    }
    if (what & ATTENTION_ATTEND) threads_share(attention->threads, work_region, attention);
    return ATTENTION_OK;
}
