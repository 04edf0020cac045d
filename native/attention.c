#include "attention_plan.h"

#include <stdlib.h>

struct attention *attention_open(struct threads *threads) {
    struct attention *attention = calloc(1, sizeof *attention);
    if (attention == NULL) return NULL;
    attention->threads = threads;
    attention->kernel = attention_kernel_of(threads_isa(threads));
    return attention;
}

void attention_close(struct attention *attention) {
    free(attention->items), free(attention->groups), free(attention->partials), free(attention->memory);
    free(attention);
}

/* What is the same for every tile of an item. */
struct walk {
    const struct attention *attention;
    const struct item *item;
    struct scratch scratch;
    int32_t rows; /* of one head */
    struct place place;
    int32_t low, high; /* the keys that any row sees */
};

static int32_t between(int32_t value, int32_t least, int32_t most) {
    return value < least ? least : value > most ? most : value;
}

static size_t element_bytes(int dtype) { return dtype == ATTENTION_BF16 ? 2 : 4; }

/* Where the tile's keys and values lie, in bytes from the pools' start; past the last key, the last one again. */
static void find_slots(const struct walk *walk, int32_t tile, int64_t *keys, int64_t *values) {
    const struct attention_layer *layer = walk->attention->layer;
    const struct attention_step *step = layer->step;
    const int32_t sequence = walk->item->sequence, last = walk->high - 1;
    const int32_t *table = step->blocks + (sequence == 0 ? 0 : step->table_ends[sequence - 1]);
    const int64_t heads = layer->num_kv_heads, size = (int64_t)element_bytes(layer->pool_dtype);
    const int64_t key_bytes = heads * layer->key_dim * size, value_bytes = heads * layer->value_dim * size;
    for (int32_t i = 0; i < TILE;) {
        int32_t at = tile + i > last ? last : tile + i, offset = at % step->block_size;
        int64_t slot = (int64_t)table[at / step->block_size] * step->block_size + offset;
        int32_t run = step->block_size - offset;
        if (run > last - at + 1) run = last - at + 1;
        if (run > TILE - i) run = TILE - i;
        for (int32_t end = i + run; i < end; i++, slot++) keys[i] = slot * key_bytes, values[i] = slot * value_bytes;
    }
}

/* Ask for a head's keys and values of a tile that comes later. */
static void fetch(const struct walk *walk, int32_t head, const int64_t *keys, const int64_t *values) {
    const struct attention_layer *layer = walk->attention->layer;
    const int64_t size = (int64_t)element_bytes(layer->pool_dtype);
    const int64_t key_bytes = layer->key_dim * size, value_bytes = layer->value_dim * size;
    const char *key = (const char *)layer->keys + head * key_bytes;
    const char *value = (const char *)layer->values + head * value_bytes;
    for (int i = 0; i < TILE; i++) {
        for (int64_t at = 0; at < key_bytes; at += 64) __builtin_prefetch(key + keys[i] + at, 0, 2);
        for (int64_t at = 0; at < value_bytes; at += 64) __builtin_prefetch(value + values[i] + at, 0, 2);
    }
}

/* Which of the tile's keys each row sees. */
static struct sight look(const struct walk *walk, int32_t tile) {
    const struct attention_layer *layer = walk->attention->layer;
    const int32_t group = walk->attention->heads_a_group;
    for (int32_t row = 0; row < walk->rows; row++) {
        int32_t position = walk->place.position + row / group;
        walk->scratch.low[row] = layer->window > 0 ? between(position - layer->window + 1 - tile, 0, TILE) : 0;
        walk->scratch.high[row] = between(position + 1 - tile, 0, TILE);
    }
    return (struct sight){walk->scratch.low, walk->scratch.high};
}

/* Bring one head's softmax past one tile. */
static void take_tile(const struct walk *walk, int32_t tile, int32_t number, const struct softmax *all,
                      struct sight sight, const int64_t *keys, const int64_t *values, int first) {
    const struct attention *attention = walk->attention;
    const struct attention_layer *layer = attention->layer;
    const struct attention_kernel *kernel = attention->kernel;
    const struct scratch *scratch = &walk->scratch;
    const int32_t padded = attention->padded, rows = walk->rows, head = walk->item->head + number;
    const size_t size = element_bytes(layer->pool_dtype);
    const int32_t count = walk->high - tile < TILE ? walk->high - tile : TILE;
    const int32_t skipped = walk->low > tile ? walk->low - tile : 0; /* of the values: nobody sees them */
    const int32_t columns = count <= kernel->lanes ? kernel->lanes : TILE;
    const struct softmax state = {all->max + number * rows, all->sum + number * rows,
                                  all->output + (int64_t)number * rows * padded};
    kernel->pack_keys(scratch->keys, (const char *)layer->keys + head * layer->key_dim * size, keys, columns,
                      layer->key_dim, layer->pool_dtype);
    kernel->product(scratch->scores, TILE, scratch->query + (int64_t)number * rows * layer->key_dim, layer->key_dim,
                    scratch->keys, TILE, rows, columns, layer->key_dim, 0);
    kernel->soften(scratch->scores, &state, sight, rows, padded, layer->softcap, first);
    kernel->expand_values(scratch->values, (const char *)layer->values + head * layer->value_dim * size, values, count,
                          layer->value_dim, padded, layer->pool_dtype);
    kernel->product(state.output, padded, scratch->scores + skipped, TILE, scratch->values + skipped * padded, padded,
                    rows, padded, count - skipped, !first);
}

/* Fill `state` with the softmax of one partition, all heads of the item. */
static void take_part(const struct walk *walk, int32_t part, const struct softmax *state) {
    const int32_t end = between(walk->high, 0, (part + 1) * PART);
    int32_t tile = between(walk->low / TILE * TILE, part * PART, end), turn = 0;
    int64_t *keys = walk->scratch.key_offsets, *values = walk->scratch.value_offsets;
    find_slots(walk, tile, keys, values);
    for (int first = 1; tile < end; tile += TILE, turn = !turn, first = 0) {
        const int32_t next = tile + TILE;
        if (next < walk->high) find_slots(walk, next, keys + !turn * TILE, values + !turn * TILE);
        struct sight sight = look(walk, tile);
        for (int32_t number = 0; number < walk->item->num_heads; number++) {
            if (next < walk->high)
                fetch(walk, walk->item->head + number, keys + !turn * TILE, values + !turn * TILE);
            take_tile(walk, tile, number, state, sight, keys + turn * TILE, values + turn * TILE, first);
        }
    }
}

static void load_queries(const struct walk *walk) {
    const struct attention_layer *layer = walk->attention->layer;
    const int32_t group = walk->attention->heads_a_group, first = walk->item->head * group;
    const size_t size = element_bytes(layer->query.dtype);
    float *to = walk->scratch.query;
    for (int32_t number = 0; number < walk->item->num_heads; number++)
        for (int32_t row = 0; row < walk->rows; row++, to += layer->key_dim) {
            int64_t at = (walk->place.row + row / group) * layer->query.row_stride +
                         (first + number * group + row % group) * layer->query.head_stride;
            walk->attention->kernel->load_query(to, (const char *)layer->query.base + at * (int64_t)size,
                                                layer->query.dtype, layer->key_dim, layer->scale);
        }
}

static void store_output(const struct walk *walk, const struct softmax *state) {
    const struct attention_layer *layer = walk->attention->layer;
    const int32_t group = walk->attention->heads_a_group;
    for (int32_t row = 0; row < walk->item->num_heads * walk->rows; row++) {
        int32_t query = row % walk->rows / group;
        int32_t head = (walk->item->head + row / walk->rows) * group + row % walk->rows % group;
        int64_t at = (walk->place.row + query) * layer->output.row_stride + head * layer->output.head_stride;
        walk->attention->kernel->finish((char *)layer->output.base + at * (int64_t)element_bytes(layer->output.dtype),
                                        layer->output.dtype, state, row, layer->value_dim, walk->attention->padded,
                                        layer->sinks == NULL ? NULL : layer->sinks + head);
    }
}

static void attend_whole(const struct walk *walk) {
    const struct item *item = walk->item;
    const struct softmax *state = &walk->scratch.state, *part = &walk->scratch.part;
    take_part(walk, item->first_part, state);
    for (int32_t number = item->first_part + 1; number < item->end_part; number++) {
        take_part(walk, number, part);
        walk->attention->kernel->merge(state, part, item->num_heads * walk->rows, walk->attention->padded);
    }
    store_output(walk, state);
}

/* Leave the item's partitions in memory; who brings the last of the group merges all, in order. */
static void attend_parts(const struct walk *walk) {
    const struct attention *attention = walk->attention;
    const struct item *item = walk->item;
    struct group *group = &attention->groups[item->group];
    const int64_t step = (softmax_floats(walk->rows, attention->padded) + 15) / 16 * 16;
    float *partials = attention->partials + group->at;
    for (int32_t number = item->first_part; number < item->end_part; number++) {
        struct softmax part = softmax_at(partials + (number - group->first_part) * step, walk->rows);
        take_part(walk, number, &part);
    }
    const int32_t count = item->end_part - item->first_part;
    if (atomic_fetch_sub(&group->left, count) != count) return;
    struct softmax state = softmax_at(partials, walk->rows);
    for (int32_t number = 1; number < group->num_parts; number++) {
        struct softmax part = softmax_at(partials + number * step, walk->rows);
        attention->kernel->merge(&state, &part, walk->rows, attention->padded);
    }
    store_output(walk, &state);
}

void attention_work(struct attention *attention, int thread) {
    const struct attention_layer *layer = attention->layer;
    struct walk walk = {.attention = attention, .scratch = scratch_of(attention, thread)};
    for (int index; (index = atomic_fetch_add(&attention->next, 1)) < attention->num_items;) {
        walk.item = &attention->items[index];
        walk.rows = walk.item->num_queries * attention->heads_a_group;
        walk.place = place_of(layer->step, walk.item);
        walk.high = walk.place.position + walk.item->num_queries;
        walk.low = layer->window > 0 ? between(walk.place.position - layer->window + 1, 0, walk.high) : 0;
        load_queries(&walk);
        if (walk.item->group < 0)
            attend_whole(&walk);
        else
            attend_parts(&walk);
    }
}
