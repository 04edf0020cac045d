#include "attention_plan.h"

#include <stdlib.h>

enum { ITEMS_A_THREAD = 4, PACK_ROWS = 8, FLOATS_A_LINE = 16 };
static const int64_t PARTIALS_MAX = 4 << 20; /* floats; larger partials are not split */

/* The queries and KV heads of one sequence that are planned together. */
struct unit {
    struct item item; /* of all heads and partitions */
    int64_t cost;     /* of one head */
};

static inline int64_t whole_lines(int64_t floats) {
    return (floats + FLOATS_A_LINE - 1) / FLOATS_A_LINE * FLOATS_A_LINE;
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static int32_t before(const int32_t *ends, int32_t index) { return index == 0 ? 0 : ends[index - 1]; }

struct place place_of(const struct attention_step *step, const struct item *item) {
    int32_t end = step->query_ends[item->sequence], first = before(step->query_ends, item->sequence);
    return (struct place){first + item->first_query,
                          step->kv_lengths[item->sequence] - (end - first) + item->first_query};
}

struct softmax softmax_at(float *at, int64_t rows) { return (struct softmax){at, at + rows, at + 2 * rows}; }

/* Reserve `count` elements; the array may move and lose its contents. */
static int reserve(void **held, int64_t *count_held, int64_t count, size_t size) {
    if (count <= *count_held) return 1;
    free(*held);
    *held = NULL, *count_held = 0;
    int64_t more = count + count / 2;
    *held = aligned_alloc(64, ((size_t)more * size + 63) / 64 * 64);
    if (*held == NULL) return 0;
    *count_held = more;
    return 1;
}

static int check(const struct attention_layer *layer) {
    const struct attention_step *step = layer->step;
    const int32_t dims[] = {layer->key_dim, layer->value_dim};
    for (int i = 0; i < 2; i++)
        if (dims[i] < 1 || dims[i] > ATTENTION_MAX_DIM || dims[i] % ATTENTION_DIM_STEP != 0) return ATTENTION_BAD_SHAPE;
    if (layer->num_kv_heads < 1 || layer->num_heads < 1 || layer->num_heads % layer->num_kv_heads != 0 ||
        layer->window < 0 || step->block_size < 1)
        return ATTENTION_BAD_SHAPE;
    for (int32_t i = 0; i < step->num_sequences; i++) {
        int64_t queries = (int64_t)step->query_ends[i] - before(step->query_ends, i);
        int64_t held = ((int64_t)step->table_ends[i] - before(step->table_ends, i)) * step->block_size;
        if (queries < 1 || step->kv_lengths[i] < queries || held < step->kv_lengths[i]) return ATTENTION_BAD_SHAPE;
    }
    for (int32_t i = 0, all = before(step->table_ends, step->num_sequences); i < all; i++)
        if (step->blocks[i] < 0 || step->blocks[i] >= step->num_blocks) return ATTENTION_BAD_BLOCK;
    for (int32_t i = 0; i < step->num_tokens; i++)
        if (step->slots[i] < 0 || step->slots[i] / step->block_size >= step->num_blocks) return ATTENTION_BAD_BLOCK;
    return before(step->query_ends, step->num_sequences) == step->num_tokens ? ATTENTION_OK : ATTENTION_BAD_SHAPE;
}

/* The unit of queries from `first` on. */
static struct unit unit_of(const struct attention *attention, int32_t sequence, int32_t first, int32_t count) {
    const struct attention_layer *layer = attention->layer;
    struct unit unit = {{.sequence = sequence, .num_heads = layer->num_kv_heads, .first_query = first,
                         .num_queries = count, .group = -1}, 0};
    int32_t position = place_of(layer->step, &unit.item).position;
    int32_t low = layer->window > 0 && position >= layer->window ? position - layer->window + 1 : 0;
    unit.item.first_part = low / PART, unit.item.end_part = (position + count - 1) / PART + 1;
    unit.cost = (int64_t)(unit.item.end_part - unit.item.first_part) * (count * attention->heads_a_group + PACK_ROWS);
    return unit;
}

typedef int unit_function(struct attention *attention, const struct unit *unit, void *context);

/* Call `function` for every unit, the last queries of a chunk first, as they have the most keys. */
static int for_units(struct attention *attention, unit_function *function, void *context) {
    const struct attention_step *step = attention->layer->step;
    int32_t tile = ROWS / attention->heads_a_group;
    if (tile < 1) tile = 1;
    for (int32_t sequence = 0; sequence < step->num_sequences; sequence++) {
        int32_t queries = step->query_ends[sequence] - before(step->query_ends, sequence);
        for (int32_t first = (queries - 1) / tile * tile; first >= 0; first -= tile) {
            struct unit unit = unit_of(attention, sequence, first, (int32_t)smaller(tile, queries - first));
            if (!function(attention, &unit, context)) return 0;
        }
    }
    return 1;
}

struct need {
    int64_t cost, items, groups, target;
};

/* How a unit is split: heads and partitions per item. */
struct cut {
    int32_t heads, parts;
};

static struct cut cut_of(const struct attention *attention, const struct unit *unit, int64_t target) {
    int32_t parts = unit->item.end_part - unit->item.first_part, queries = unit->item.num_queries;
    int64_t heads = target / unit->cost, rows = (int64_t)queries * attention->heads_a_group;
    if (heads >= 1) return (struct cut){queries > 1 ? 1 : (int32_t)smaller(heads, unit->item.num_heads), parts};
    int64_t floats = unit->item.num_heads * whole_lines(softmax_floats(rows, attention->padded)) * parts;
    int64_t fewer = parts * target / unit->cost;
    if (fewer >= parts || attention->num_partials + floats > PARTIALS_MAX) return (struct cut){1, parts};
    return (struct cut){1, fewer < 1 ? 1 : (int32_t)fewer};
}

static int add_cost(struct attention *attention, const struct unit *unit, void *context) {
    struct need *need = context;
    (void)attention;
    need->cost += unit->cost * unit->item.num_heads;
    need->items += (int64_t)unit->item.num_heads * (unit->item.end_part - unit->item.first_part);
    need->groups += unit->item.num_heads;
    return 1;
}

/* Split one head's partitions into items of a new group. */
static void add_group(struct attention *attention, struct item item, int32_t parts) {
    struct group *group = &attention->groups[attention->num_groups];
    int64_t rows = (int64_t)item.num_queries * attention->heads_a_group;
    int32_t end = item.end_part;
    group->first_part = item.first_part, group->num_parts = end - item.first_part, group->at = attention->num_partials;
    atomic_store_explicit(&group->left, group->num_parts, memory_order_relaxed);
    attention->num_partials += whole_lines(softmax_floats(rows, attention->padded)) * group->num_parts;
    item.group = (int32_t)attention->num_groups++;
    for (; item.first_part < end; item.first_part += parts) {
        item.end_part = (int32_t)smaller(item.first_part + parts, end);
        attention->items[attention->num_items++] = item;
    }
}

static int add_items(struct attention *attention, const struct unit *unit, void *context) {
    struct cut cut = cut_of(attention, unit, ((struct need *)context)->target);
    int32_t parts = unit->item.end_part - unit->item.first_part;
    struct item item = unit->item;
    for (item.head = 0; item.head < unit->item.num_heads; item.head += cut.heads) {
        item.num_heads = (int32_t)smaller(cut.heads, unit->item.num_heads - item.head);
        if (cut.parts < parts)
            add_group(attention, item, cut.parts);
        else
            attention->items[attention->num_items++] = item;
    }
    return 1;
}

/* Floats that one thread needs, each buffer starting at a cache line. */
static int64_t scratch_floats(const struct attention *attention) {
    const struct attention_layer *layer = attention->layer;
    int64_t rows = attention->rows_max;
    return whole_lines(rows * layer->key_dim) + rows * TILE + (int64_t)layer->key_dim * TILE +
           whole_lines((int64_t)TILE * attention->padded) + 2 * whole_lines(softmax_floats(rows, attention->padded)) +
           2 * (2 * TILE * 2) + 2 * whole_lines(rows);
}

struct scratch scratch_of(const struct attention *attention, int thread) {
    const struct attention_layer *layer = attention->layer;
    int64_t rows = attention->rows_max;
    struct scratch scratch;
    float *at = attention->memory + thread * attention->scratch_floats;
    scratch.query = at, at += whole_lines(rows * layer->key_dim);
    scratch.scores = at, at += rows * TILE;
    scratch.keys = at, at += (int64_t)layer->key_dim * TILE;
    scratch.values = at, at += whole_lines((int64_t)TILE * attention->padded);
    scratch.state = softmax_at(at, rows), at += whole_lines(softmax_floats(rows, attention->padded));
    scratch.part = softmax_at(at, rows), at += whole_lines(softmax_floats(rows, attention->padded));
    scratch.key_offsets = (int64_t *)at, at += 2 * TILE * 2;
    scratch.value_offsets = (int64_t *)at, at += 2 * TILE * 2;
    scratch.low = (int32_t *)at, at += whole_lines(rows);
    scratch.high = (int32_t *)at;
    return scratch;
}

int attention_prepare(struct attention *attention, const struct attention_layer *layer) {
    int error = check(layer);
    if (error != ATTENTION_OK) return error;
    int lanes = attention->kernel->lanes, threads = threads_count(attention->threads);
    attention->layer = layer;
    attention->heads_a_group = layer->num_heads / layer->num_kv_heads;
    attention->padded = (layer->value_dim + lanes - 1) / lanes * lanes;
    attention->rows_max = layer->num_heads > ROWS ? layer->num_heads : ROWS;
    attention->scratch_floats = scratch_floats(attention);
    attention->num_items = attention->num_groups = attention->num_partials = 0;
    struct need need = {0};
    for_units(attention, add_cost, &need);
    need.target = threads == 1 ? INT64_MAX / 4 : need.cost / (threads * ITEMS_A_THREAD) + 1;
    if (!reserve((void **)&attention->items, &attention->items_held, need.items, sizeof *attention->items) ||
        !reserve((void **)&attention->groups, &attention->groups_held, need.groups, sizeof *attention->groups) ||
        !reserve((void **)&attention->memory, &attention->memory_held, attention->scratch_floats * threads,
                 sizeof *attention->memory))
        return ATTENTION_NO_MEMORY;
    for_units(attention, add_items, &need);
    if (!reserve((void **)&attention->partials, &attention->partials_held, attention->num_partials, sizeof(float)))
        return ATTENTION_NO_MEMORY;
    atomic_store(&attention->next, 0);
    return ATTENTION_OK;
}
