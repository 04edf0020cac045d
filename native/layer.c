#include "layer.h"

#include <string.h>

const uint32_t decoder_struct_sizes[] = {
    sizeof(struct linear), sizeof(struct packing), sizeof(struct layer), sizeof(struct decoder), sizeof(struct step),
    sizeof(struct instruction),
};

struct program {
    struct threads *threads;
    const struct decoder *decoder;
    const struct step *step;
    const struct instruction *instructions;
    size_t count;
    const struct linear_kernel *products;
    struct attention_layer attention; /* of the current layer; written by thread 0 */
    int refused;                      /* enum attention_error */
    int attends;                      /* whether any of the instructions does */
};

/* One thread's view of a running program. */
struct worker_view {
    struct program *program;
    struct threads *threads;
    const struct decoder *decoder;
    const struct step *step;
    const struct linear_kernel *kernel; /* for everything but products */
    unsigned thread, count;
    const struct layer *planned; /* the layer whose attention is planned; the same in every thread */
};

static inline size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

static inline size_t part(size_t total, const struct worker_view *view, unsigned index) {
    return total * index / view->count;
}

static void barrier(const struct worker_view *view) { threads_barrier(view->threads, (int)view->count); }

/* Normalise rows [0, num_rows) of `from`, or the `chosen` ones, and return their address.
 *
 * Every thread computes few rows by itself: that is faster than waiting for the others.
 */
static const float *normalise(const struct worker_view *view, const float *from, const int64_t *chosen,
                              size_t num_rows, const float *weight) {
    const struct step *step = view->step;
    size_t stride = step->hidden_stride, size = round_up(view->decoder->hidden, PANEL);
    int alone = num_rows <= SCRATCH_ROWS;
    float *to = step->scratch + (alone ? view->thread * SCRATCH_ROWS * stride : 0);
    size_t row = alone ? 0 : part(num_rows, view, view->thread);
    size_t end = alone ? num_rows : part(num_rows, view, view->thread + 1);
    for (; row < end; row++) {
        const float *at = from + (size_t)(chosen ? chosen[row] : (int64_t)row) * stride;
        view->kernel->norm(at, weight, to + row * stride, size, view->decoder->hidden, view->decoder->epsilon,
                           (int)view->decoder->rounded);
    }
    if (!alone) barrier(view);
    return to;
}

/* Return rows [num_rows][k] in bfloat16, with zeros up to a multiple of 32. */
static const uint16_t *narrow_rows(const struct worker_view *view, const float *rows, size_t stride, size_t num_rows,
                                   size_t k) {
    const struct step *step = view->step;
    int alone = num_rows <= SCRATCH_ROWS;
    uint16_t *to = step->narrow + (alone ? (size_t)view->thread * SCRATCH_ROWS * step->narrow_stride : 0);
    size_t row = alone ? 0 : part(num_rows, view, view->thread);
    size_t end = alone ? num_rows : part(num_rows, view, view->thread + 1);
    for (; row < end; row++) {
        uint16_t *narrow = to + row * step->narrow_stride;
        view->kernel->narrow(narrow, rows + row * stride, k);
        memset(narrow + k, 0, (round_up(k, 32) - k) * sizeof *narrow);
    }
    if (!alone) barrier(view);
    return to;
}

static void multiply(const struct worker_view *view, const struct linear *linear, const float *rows, size_t stride,
                     size_t num_rows, float *out, size_t out_stride) {
    const struct linear_kernel *kernel = view->program->products;
    const void *from = rows;
    if (kernel->row_format == FORMAT_BFLOAT16) {
        from = narrow_rows(view, rows, stride, num_rows, linear->k);
        stride = view->step->narrow_stride;
    }
    linear_run(linear, kernel, from, stride, num_rows, out, out_stride, (int)view->decoder->rounded, view->thread,
               view->count);
    barrier(view);
}

static void write_head(const struct worker_view *view, void *pool, int64_t slot, size_t head, const float *from) {
    const struct decoder *decoder = view->decoder;
    size_t at = ((size_t)slot * decoder->num_kv_heads + head) * decoder->head_dim;
    if (decoder->pool_format == FORMAT_BFLOAT16)
        view->kernel->narrow((uint16_t *)pool + at, from, decoder->head_dim);
    else
        memcpy((float *)pool + at, from, decoder->head_dim * sizeof(float));
}

/* Rotate one query or key head of a row, after its norm if the model has one; write keys and values to their slot. */
static void place_head(const struct worker_view *view, const struct layer *layer, size_t row, size_t head) {
    const struct decoder *decoder = view->decoder;
    const struct step *step = view->step;
    size_t dim = decoder->head_dim, kv_heads = decoder->num_kv_heads;
    float *qkv = step->qkv + row * step->qkv_stride;
    if (head >= decoder->num_heads + kv_heads) {
        size_t value = head - decoder->num_heads - kv_heads;
        write_head(view, layer->values, step->slots[row], value, qkv + decoder->value_column + value * dim);
        return;
    }
    int is_key = head >= decoder->num_heads;
    size_t key = head - decoder->num_heads;
    float *at = is_key ? qkv + decoder->key_column + key * dim : qkv + head * dim;
    const float *norm = is_key ? layer->key_norm : layer->query_norm;
    if (norm != NULL) view->kernel->norm(at, norm, at, dim, dim, decoder->epsilon, (int)decoder->rounded);
    size_t angle = (size_t)step->positions[row] * (dim / 2);
    view->kernel->rotate(at, step->cosine + angle, step->sine + angle, dim, (int)decoder->rounded);
    if (is_key) write_head(view, layer->keys, step->slots[row], key, at);
}

static struct attention_rows heads_of(float *base, uint32_t stride, uint32_t head_dim) {
    return (struct attention_rows){base, stride, head_dim, ATTENTION_F32, 0};
}

static void plan_attention(const struct worker_view *view, const struct layer *layer) {
    const struct decoder *decoder = view->decoder;
    const struct step *step = view->step;
    int32_t pool_dtype = decoder->pool_format == FORMAT_BFLOAT16 ? ATTENTION_BF16 : ATTENTION_F32;
    struct program *program = view->program;
    program->attention = (struct attention_layer){
        .step = step->sequences, .keys = layer->keys, .values = layer->values,
        .query = heads_of(step->qkv, step->qkv_stride, decoder->head_dim),
        .output = heads_of(step->attended, step->attended_stride, decoder->head_dim),
        .pool_dtype = pool_dtype, .num_heads = (int32_t)decoder->num_heads,
        .num_kv_heads = (int32_t)decoder->num_kv_heads, .key_dim = (int32_t)decoder->head_dim,
        .value_dim = (int32_t)decoder->head_dim, .window = layer->window, .scale = layer->scale,
        .softcap = layer->softcap,
    };
    if (program->refused == ATTENTION_OK)
        program->refused = attention_prepare(step->attention, &program->attention);
}

static void enter(struct worker_view *view, const struct layer *layer) {
    const struct step *step = view->step;
    const float *normed = normalise(view, step->x, NULL, step->num_rows, layer->input_norm);
    multiply(view, &layer->qkv, normed, step->hidden_stride, step->num_rows, step->qkv, step->qkv_stride);
    size_t heads = view->decoder->num_heads + 2 * view->decoder->num_kv_heads, total = heads * step->num_rows;
    for (size_t i = part(total, view, view->thread); i < part(total, view, view->thread + 1); i++)
        place_head(view, layer, i / heads, i % heads);
    if (view->program->attends) {
        if (view->thread == 0) plan_attention(view, layer);
        view->planned = layer;
    }
    barrier(view);
}

static void attend(const struct worker_view *view, const struct layer *layer) {
    if (view->planned != layer) {
        if (view->thread == 0) plan_attention(view, layer);
        barrier(view);
    }
    if (view->program->refused == ATTENTION_OK) attention_work(view->step->attention, (int)view->thread);
    barrier(view);
}

/* Add a product to x, or store it for the sum over ranks. */
static void multiply_into_x(const struct worker_view *view, const struct linear *linear, const float *rows,
                            size_t stride) {
    const struct step *step = view->step;
    struct linear product = *linear;
    if (view->decoder->partial) product.finish = FINISH_STORE;
    float *to = view->decoder->partial ? step->partial : step->x;
    multiply(view, &product, rows, stride, step->num_rows, to, step->hidden_stride);
}

static void out(const struct worker_view *view, const struct layer *layer) {
    multiply_into_x(view, &layer->out, view->step->attended, view->step->attended_stride);
}

static void mlp(const struct worker_view *view, const struct layer *layer) {
    const struct step *step = view->step;
    const float *normed = normalise(view, step->x, NULL, step->num_rows, layer->post_norm);
    multiply(view, &layer->gate_up, normed, step->hidden_stride, step->num_rows, step->inner, step->inner_stride);
    multiply_into_x(view, &layer->down, step->inner, step->inner_stride);
}

static void add(const struct worker_view *view) {
    const struct step *step = view->step;
    size_t size = round_up(view->decoder->hidden, PANEL), end = part(step->num_rows, view, view->thread + 1);
    for (size_t row = part(step->num_rows, view, view->thread); row < end; row++)
        view->kernel->add(step->x + row * step->hidden_stride, step->partial + row * step->hidden_stride, size,
                          (int)view->decoder->rounded);
    barrier(view);
}

static void head(const struct worker_view *view) {
    const struct step *step = view->step;
    const float *normed = normalise(view, step->x, step->sample_rows, step->num_samples, view->decoder->final_norm);
    multiply(view, &view->decoder->head, normed, step->hidden_stride, step->num_samples, step->logits,
             step->logits_stride);
}

static void notify(const struct worker_view *view, uint32_t layer) {
    if (view->thread == 0 && view->step->notify != NULL) view->step->notify(layer);
}

static void run_one(struct worker_view *view, const struct instruction *instruction) {
    const struct layer *layer = &view->decoder->layers[instruction->layer];
    switch (instruction->operation) {
        case OP_ENTER: enter(view, layer); break;
        case OP_NOTIFY: notify(view, instruction->layer); break;
        case OP_ATTEND: attend(view, layer); break;
        case OP_OUT: out(view, layer); break;
        case OP_MLP: mlp(view, layer); break;
        case OP_ADD: add(view); break;
        case OP_HEAD: head(view); break;
    }
}

static void run_program(void *context, int thread, int count) {
    struct program *program = context;
    struct worker_view view = {
        .program = program, .threads = program->threads, .decoder = program->decoder, .step = program->step,
        .kernel = linear_kernel_of(threads_isa(program->threads), FORMAT_FLOAT32),
        .thread = (unsigned)thread, .count = (unsigned)count,
    };
    for (size_t i = 0; i < program->count; i++) run_one(&view, &program->instructions[i]);
}

static int all_below(const int64_t *values, size_t count, uint64_t limit) {
    for (size_t i = 0; i < count; i++)
        if ((uint64_t)values[i] >= limit) return 0;
    return 1;
}

/* Whether the step has the inputs of ATTEND, for as many tokens as there are rows. */
static int can_attend(const struct step *step) {
    return step->attention != NULL && step->sequences != NULL && step->sequences->num_tokens >= 0 &&
           (uint32_t)step->sequences->num_tokens == step->num_rows;
}

static enum decoder_error check(struct program *program) {
    const struct decoder *decoder = program->decoder;
    const struct step *step = program->step;
    int entered = 0; /* all layers use the same positions and slots */
    if (step->num_rows > step->passing_rows || step->num_samples > step->passing_rows) return DECODER_BAD_INDEX;
    for (size_t i = 0; i < program->count; i++) {
        const struct instruction *instruction = &program->instructions[i];
        if (instruction->operation >= NUM_OPERATIONS || instruction->layer >= decoder->num_layers)
            return DECODER_BAD_PROGRAM;
        if (instruction->operation == OP_ATTEND && !program->attends++ && !can_attend(step))
            return DECODER_BAD_PROGRAM;
        if (instruction->operation == OP_HEAD && !all_below(step->sample_rows, step->num_samples, step->num_rows))
            return DECODER_BAD_INDEX;
        if (instruction->operation == OP_ENTER && !entered++ &&
            !(all_below(step->slots, step->num_rows, decoder->num_slots) &&
              all_below(step->positions, step->num_rows, step->num_positions)))
            return DECODER_BAD_INDEX;
    }
    return DECODER_OK;
}

int decoder_run(struct threads *threads, const struct decoder *decoder, const struct step *step,
                const struct instruction *instructions, size_t count) {
    if (decoder->num_layers == 0) return DECODER_BAD_PROGRAM;
    const struct linear_kernel *products = linear_kernel_of(threads_isa(threads), decoder->layers[0].qkv.format);
    struct program program = {threads, decoder, step, instructions, count, products, {0}, ATTENTION_OK, 0};
    enum decoder_error error = check(&program);
    if (error != DECODER_OK) return (int)error;
    threads_run(threads, run_program, &program);
    return program.refused == ATTENTION_OK ? DECODER_OK : DECODER_ATTENTION + program.refused;
}

static void pack_part(void *context, int thread, int count) {
    const struct packing *packing = context;
    size_t panels = (packing->columns + PANEL - 1) / PANEL;
    linear_pack(packing, panels * (size_t)thread / (size_t)count, panels * ((size_t)thread + 1) / (size_t)count);
}

void decoder_pack(struct threads *threads, const struct packing *packing) {
    threads_run(threads, pack_part, (void *)packing);
}

struct embedding {
    const struct linear *head;
    const int64_t *tokens;
    size_t num_rows, stride;
    float *x;
};

static void embed_part(void *context, int thread, int count) {
    const struct embedding *embedding = context;
    size_t row = embedding->num_rows * (size_t)thread / (size_t)count;
    size_t end = embedding->num_rows * ((size_t)thread + 1) / (size_t)count;
    for (; row < end; row++)
        linear_unpack_row(embedding->head, (size_t)embedding->tokens[row], embedding->x + row * embedding->stride);
}

int decoder_embed(struct threads *threads, const struct linear *head, const int64_t *tokens, size_t num_rows, float *x,
                   size_t stride) {
    struct embedding embedding = {head, tokens, num_rows, stride, x};
    if (!all_below(tokens, num_rows, head->n)) return DECODER_BAD_INDEX;
    threads_run(threads, embed_part, &embedding);
    return DECODER_OK;
}
