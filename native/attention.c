#include "attention_plan.h"

#include <stdlib.h>

enum {
    FEW_ROWS = 6,    /* up to this many rows, keys and values are used once: packing them does not pay */
    CLAIMED_LATE = 4 /* items per thread */
};

const uint32_t attention_struct_sizes[] = {
    sizeof(struct attention_step), sizeof(struct attention_rows), sizeof(struct attention_layer),
};

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

/* Offsets of a tile's keys and values, in bytes from the pools' start. */
struct tile {
    int32_t start, head; /* head: the item's first */
    int64_t *keys, *values;
};

/* Values shared by all tiles of an item. */
struct walk {
    const struct attention *attention;
    const struct item *item;
    struct scratch scratch;
    int32_t rows; /* of one head */
    struct place place;
    int32_t low, high;       /* the range of keys visible to any row */
    const struct walk *next; /* this thread's next item, if it has claimed one */
};

static int32_t between(int32_t value, int32_t least, int32_t most) {
    return value < least ? least : value > most ? most : value;
}

static int32_t element_bytes(int dtype) { return dtype == ATTENTION_BF16 ? 2 : 4; }

/* Return the tile at `start`; positions past the item's last key repeat that key. `turn`: which buffer to use. */
static struct tile tile_at(const struct walk *walk, int32_t start, int turn) {
    const struct tile tile = {start, walk->item->head, walk->scratch.key_offsets + turn * TILE,
                              walk->scratch.value_offsets + turn * TILE};
    const struct attention_layer *layer = walk->attention->layer;
    const struct attention_step *step = layer->step;
    const int32_t sequence = walk->item->sequence, last = walk->high - 1;
    const int32_t *table = step->blocks + (sequence == 0 ? 0 : step->table_ends[sequence - 1]);
    const int64_t heads = layer->num_kv_heads, size = element_bytes(layer->pool_dtype);
    const int64_t key_bytes = heads * layer->key_dim * size, value_bytes = heads * layer->value_dim * size;
    int32_t at = start > last ? last : start, block = at / step->block_size, offset = at % step->block_size, i = 0;
    for (; i < TILE && at <= last; block++, offset = 0) {
        int64_t slot = (int64_t)table[block] * step->block_size + offset;
        int32_t run = step->block_size - offset;
        if (run > last - at + 1) run = last - at + 1;
        if (run > TILE - i) run = TILE - i;
        at += run;
        for (int32_t end = i + run; i < end; i++, slot++)
            tile.keys[i] = slot * key_bytes, tile.values[i] = slot * value_bytes;
    }
    for (; i < TILE; i++) tile.keys[i] = tile.keys[i - 1], tile.values[i] = tile.values[i - 1];
    return tile;
}

/* Return where a partition's tiles begin; no row sees the keys before them. */
static int32_t first_tile(const struct walk *walk, int32_t part) {
    const int32_t seen = walk->low / TILE * TILE;
    return seen > part * PART ? seen : part * PART;
}

/* Return this thread's tile after the one at `start`; without `keys` if it has none yet. */
static struct tile tile_after(const struct walk *walk, int32_t start, int turn) {
    if (start + TILE < walk->high && (walk->item->group < 0 || start + TILE < walk->item->end_part * PART))
        return tile_at(walk, start + TILE, turn);
    const struct walk *next = walk->next;
    return next == NULL ? (struct tile){0} : tile_at(next, first_tile(next, next->item->first_part), turn);
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

/* Return `count` rows of head `number` of an item, from row `first` of its tile on. */
static struct pool_rows rows_of(const struct walk *walk, const void *pool, int32_t head, int32_t dim,
                                const int64_t *offsets, int32_t first, int32_t count) {
    const int32_t bytes = dim * element_bytes(walk->attention->layer->pool_dtype);
    return (struct pool_rows){(const char *)pool + (int64_t)head * bytes, offsets + first, bytes, count};
}

/* Return head `number` of the item's next tile, empty if there is none. */
static struct ahead ahead_of(const struct walk *walk, const struct tile *next, int32_t number) {
    const struct attention_layer *layer = walk->attention->layer;
    const int32_t wanted = next->keys == NULL ? 0 : TILE, head = next->head + number;
    return (struct ahead){rows_of(walk, layer->keys, head, layer->key_dim, next->keys, 0, wanted),
                          rows_of(walk, layer->values, head, layer->value_dim, next->values, 0, wanted)};
}

/* Process one tile for head `number` of the item, and prefetch the next tile meanwhile. */
static void take_tile(const struct walk *walk, const struct tile *tile, const struct tile *next, int32_t number,
                      const struct softmax *all, struct sight sight, int first) {
    const struct attention *attention = walk->attention;
    const struct attention_layer *layer = attention->layer;
    const struct attention_kernel *kernel = attention->kernel;
    const struct scratch *scratch = &walk->scratch;
    const int32_t padded = attention->padded, rows = walk->rows, key_dim = layer->key_dim, dim = layer->value_dim;
    const int32_t count = walk->high - tile->start < TILE ? walk->high - tile->start : TILE;
    const int32_t skipped = walk->low > tile->start ? walk->low - tile->start : 0; /* of the values: unseen */
    const int32_t unit = rows <= FEW_ROWS ? kernel->score_keys : kernel->lanes;
    const int32_t columns = (count + unit - 1) / unit * unit, head = tile->head + number;
    const struct softmax state = {all->max + number * rows, all->sum + number * rows,
                                  all->output + (int64_t)number * rows * padded};
    const struct pool_rows keys = rows_of(walk, layer->keys, head, key_dim, tile->keys, 0, columns);
    const struct pool_rows values = rows_of(walk, layer->values, head, dim, tile->values, skipped, count - skipped);
    struct ahead ahead = ahead_of(walk, next, number);
    const float *query = scratch->query + (int64_t)number * rows * key_dim, *weights = scratch->scores + skipped;
    if (rows <= FEW_ROWS) {
        kernel->score(scratch->scores, query, keys, key_dim, layer->pool_dtype, rows, &ahead);
    } else {
        kernel->pack_keys(scratch->keys, keys, key_dim, layer->pool_dtype, &ahead);
        kernel->product(scratch->scores, TILE, query, key_dim, scratch->keys, TILE, rows, columns, key_dim, 0, &ahead);
    }
    kernel->soften(scratch->scores, &state, sight, rows, padded, layer->softcap, first, &ahead);
    if (rows <= FEW_ROWS && dim == padded) {
        kernel->product_in_place(state.output, padded, weights, TILE, values, layer->pool_dtype, rows, dim, !first,
                                 &ahead);
    } else {
        kernel->expand_values(scratch->values, values, dim, padded, layer->pool_dtype);
        kernel->product(state.output, padded, weights, TILE, scratch->values, padded, rows, padded, values.count,
                        !first, &ahead);
    }
    while (fetch_row(&ahead)) continue; /* prefetch the rest, for which a tile of few keys left no time */
}

/* Fill `state` with the softmax of one partition, all heads of the item. */
static void take_part(const struct walk *walk, int32_t part, const struct softmax *state) {
    const int32_t end = between(walk->high, 0, (part + 1) * PART);
    int32_t start = first_tile(walk, part);
    struct tile tile = tile_at(walk, start, 0), next;
    for (int first = 1, turn = 1; start < end; start += TILE, turn = !turn, first = 0, tile = next) {
        next = tile_after(walk, start, turn);
        struct sight sight = look(walk, start);
        for (int32_t number = 0; number < walk->item->num_heads; number++)
            take_tile(walk, &tile, &next, number, state, sight, first);
    }
}

static void load_queries(const struct walk *walk) {
    const struct attention_layer *layer = walk->attention->layer;
    const int32_t group = walk->attention->heads_a_group, first = walk->item->head * group;
    const int64_t size = element_bytes(layer->query.dtype);
    float *to = walk->scratch.query;
    for (int32_t number = 0; number < walk->item->num_heads; number++)
        for (int32_t row = 0; row < walk->rows; row++, to += layer->key_dim) {
            int64_t at = (walk->place.row + row / group) * layer->query.row_stride +
                         (first + number * group + row % group) * layer->query.head_stride;
            walk->attention->kernel->load_query(to, (const char *)layer->query.base + at * size,
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
        walk->attention->kernel->finish((char *)layer->output.base + at * element_bytes(layer->output.dtype),
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

/* Store the item's partitions; the thread that stores the group's last ones merges all, in order. */
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

/* Claim an item; return 0 if none is left. */
static int claim(struct attention *attention, struct walk *walk) {
    const struct attention_layer *layer = attention->layer;
    int index = atomic_fetch_add(&attention->next, 1);
    if (index >= attention->num_items) return 0;
    walk->item = &attention->items[index];
    walk->rows = walk->item->num_queries * attention->heads_a_group;
    walk->place = place_of(layer->step, walk->item);
    walk->high = walk->place.position + walk->item->num_queries;
    walk->low = layer->window > 0 ? between(walk->place.position - layer->window + 1, 0, walk->high) : 0;
    return 1;
}

void attention_work(struct attention *attention, int thread) {
    struct walk walks[2] = {{.attention = attention, .scratch = scratch_of(attention, thread)}};
    const int64_t many = attention->num_items - CLAIMED_LATE * threads_count(attention->threads);
    walks[1] = walks[0];
    struct walk *walk = &walks[0], *other = &walks[1];
    for (int claimed = claim(attention, walk); claimed;) {
        /* Near the end items are not claimed in advance: another thread may be free to take them. */
        int ahead = atomic_load_explicit(&attention->next, memory_order_relaxed) < many && claim(attention, other);
        walk->next = ahead ? other : NULL;
        load_queries(walk);
        if (walk->item->group < 0)
            attend_whole(walk);
        else
            attend_parts(walk);
        struct walk *done = walk;
        walk = other, other = done;
        claimed = ahead || claim(attention, walk);
    }
}
