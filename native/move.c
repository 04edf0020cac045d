/* Copy and digest scattered bytes in one pass. Plain C ABI; no state, no allocation, no system call.
 *
 * A run is `rows` rows of `row_bytes`, each `stride` bytes after the one before. Source and target are lists of runs
 * with equally many bytes, split differently. The caller has checked that every run is within its memory.
 *
 * A CPU cannot predict the address of the next block in a fragmented pool. So with a digest, which needs the bytes in
 * order, the source is prefetched AHEAD_BYTES early, across the gaps; without one up to LANES pieces are copied in
 * parallel.
 */

#include "kernels.h"

struct run {
    uint64_t offset, row_bytes, stride, rows; /* only `offset` and, for a single row, `stride` may be 0 */
};

enum { FLAG_DIGEST = 1, FLAG_STREAM = 2, KERNEL_SHIFT = 8 };
enum { LOOK_BYTES = 256 << 10, STEP_BYTES = 4096, AHEAD_BYTES = 4096 };
enum { LANES = 16, LANE_BYTES = 8192, LANE_MIN_BYTES = 1024, LANE_STEP_BYTES = 512 };

/* Walks the rows of a list of runs. */
struct cursor {
    const struct run *run;
    uint8_t *base, *row, *at;
    uint64_t left, rows; /* bytes left in this row, rows left after it */
};

static void enter(struct cursor *cursor, const struct run *run) {
    cursor->run = run;
    cursor->row = cursor->at = cursor->base + run->offset;
    cursor->left = run->row_bytes, cursor->rows = run->rows - 1;
}

/* Advance by `count` bytes of this row; `more`: bytes follow. */
static inline void advance(struct cursor *cursor, uint64_t count, int more) {
    cursor->at += count, cursor->left -= count;
    if (cursor->left > 0 || !more) return;
    if (cursor->rows == 0) {
        enter(cursor, cursor->run + 1);
        return;
    }
    cursor->rows--;
    cursor->row = cursor->at = cursor->row + cursor->run->stride;
    cursor->left = cursor->run->row_bytes;
}

/* Advance `ahead` by `count` bytes, at most `left`, and prefetch them if `fetch`; return the bytes left. */
static inline uint64_t pass(struct cursor *ahead, uint64_t count, uint64_t left, int fetch) {
    while (count > 0 && left > 0) {
        uint64_t part = ahead->left < count ? ahead->left : count;
        for (uint64_t at = 0; fetch && at < part; at += STRIPE) __builtin_prefetch(ahead->at + at);
        count -= part, left -= part;
        advance(ahead, part, left > 0);
    }
    return left;
}

/* One move: its options, and the state of its digest. */
struct move {
    struct stream stream;
    const struct kernel *kernel;
    int streamed;
    uint64_t total, stripes_left; /* not counting the last 1..64 bytes */
    unsigned held;                /* bytes at the start of `hold` that are copied but not yet digested */
    uint8_t hold[SHORT_MAX + 16]; /* less than a stripe; at the end a whole one; all bytes of a short move */
    uint8_t before[STRIPE];       /* the last stripe that was digested */
};

static void keep(struct move *move, uint8_t *to, const uint8_t *from, uint64_t count) {
    memcpy(move->hold + move->held, from, count);
    __asm__ volatile("" ::: "memory"); /* stops the compiler from reading the source again, which may have changed */
    if (to != from) memcpy(to, move->hold + move->held, count);
    move->held += (unsigned)count;
}

static void add_held(struct move *move) {
    move->kernel->digest(&move->stream, NULL, move->hold, 1);
    memcpy(move->before, move->hold, STRIPE);
    move->stripes_left--, move->held = 0;
}

/* Copy (unless `to` is `from`) and digest `count` bytes. */
static void add(struct move *move, uint8_t *to, const uint8_t *from, uint64_t count) {
    if (move->total <= SHORT_MAX) {
        keep(move, to, from, count);
        return;
    }
    if (move->held > 0) {
        uint64_t fill = STRIPE - move->held < count ? STRIPE - move->held : count;
        keep(move, to, from, fill);
        if (move->held < STRIPE || move->stripes_left == 0) return; /* no bytes left, or a last stripe */
        add_held(move);
        from += fill, to += fill, count -= fill;
    }
    uint64_t stripes = count / STRIPE < move->stripes_left ? count / STRIPE : move->stripes_left;
    if (stripes > 0) {
        const struct kernel *kernel = move->kernel;
        if (to == from)
            kernel->digest(&move->stream, to, from, stripes);
        else if (move->streamed && (uintptr_t)to % STRIPE == 0)
            kernel->stream_digest(&move->stream, to, from, stripes);
        else
            kernel->copy_digest(&move->stream, to, from, stripes);
        from += stripes * STRIPE, to += stripes * STRIPE, count -= stripes * STRIPE;
        move->stripes_left -= stripes;
        if (move->stripes_left == 0) memcpy(move->before, to - STRIPE, STRIPE);
    }
    if (count > 0) keep(move, to, from, count);
}

static uint64_t finish(struct move *move) {
    if (move->total <= SHORT_MAX) return digest_short(move->hold, move->total);
    uint8_t last[STRIPE];
    memcpy(last, move->before + move->held, STRIPE - move->held);
    memcpy(last + STRIPE - move->held, move->hold, move->held);
    lanes_add(move->stream.lanes, last, SECRET + sizeof SECRET - STRIPE - 7);
    return lanes_finish(move->stream.lanes, move->total);
}

/* Pieces copied in parallel: several streams of reads use more memory bandwidth than one. */
struct lanes {
    unsigned count;
    struct {
        uint8_t *to;
        const uint8_t *from;
        uint64_t left;
    } lane[LANES];
};

/* `to` is a multiple of 64. */
static inline void copy_streamed(const struct kernel *kernel, uint8_t *to, const uint8_t *from, uint64_t count) {
    uint64_t whole = count / STRIPE * STRIPE;
    kernel->stream_copy(to, from, count / STRIPE);
    if (count > whole) memcpy(to + whole, from + whole, count - whole);
}

static void copy_lanes(const struct kernel *kernel, struct lanes *lanes) {
    for (unsigned going = lanes->count; going > 0;) {
        going = 0;
        for (unsigned i = 0; i < lanes->count; i++) {
            uint64_t count = lanes->lane[i].left < LANE_STEP_BYTES ? lanes->lane[i].left : LANE_STEP_BYTES;
            copy_streamed(kernel, lanes->lane[i].to, lanes->lane[i].from, count);
            lanes->lane[i].to += count, lanes->lane[i].from += count, lanes->lane[i].left -= count;
            going += lanes->lane[i].left > 0;
        }
    }
    lanes->count = 0;
}

/* Copy `count` bytes: at once, or in a streamed move when enough lanes are filled. */
static void copy(const struct move *move, struct lanes *lanes, uint8_t *to, const uint8_t *from, uint64_t count) {
    uint64_t head = -(uintptr_t)to % STRIPE;
    if (!move->streamed || count < 2 * STRIPE) {
        memcpy(to, from, count);
        return;
    }
    memcpy(to, from, head);
    from += head, to += head, count -= head;
    if (count < LANE_MIN_BYTES - STRIPE) {
        copy_streamed(move->kernel, to, from, count);
        return;
    }
    lanes->lane[lanes->count].to = to, lanes->lane[lanes->count].from = from;
    lanes->lane[lanes->count++].left = count;
    if (lanes->count == LANES) copy_lanes(move->kernel, lanes);
}

static void start(struct move *move, uint64_t total, uint32_t flags) {
    move->kernel = kernel_of(flags >> KERNEL_SHIFT);
    move->streamed = (flags & FLAG_STREAM) != 0;
    move->total = total, move->stripes_left = total > 0 ? (total - 1) / STRIPE : 0;
    move->held = 0, move->stream.phase = 0;
    lanes_start(move->stream.lanes);
}

/* Return which kernels this CPU can run: bit n for kernel n. */
uint32_t native_kernels(void) {
    uint32_t found = 0;
    for (unsigned number = 0; number < NUM_KERNELS; number++)
        if (kernel_of(number) != NULL) found |= 1u << number;
    return found;
}

/* Return the digest of `total` bytes. */
uint64_t native_digest(const uint8_t *base, const struct run *runs, uint64_t total, uint32_t flags) {
    struct move move;
    struct cursor source = {.base = (uint8_t *)base};
    start(&move, total, flags);
    if (total > 0) enter(&source, runs);
    struct cursor ahead = source;
    uint64_t unfetched = pass(&ahead, AHEAD_BYTES, total, 1);
    for (uint64_t left = total; left > 0;) {
        uint64_t count = source.left < STEP_BYTES ? source.left : STEP_BYTES;
        unfetched = pass(&ahead, count, unfetched, 1);
        left -= count;
        add(&move, source.at, source.at, count);
        advance(&source, count, left > 0);
    }
    return finish(&move);
}

/* Copy `total` bytes and return their digest, or 0 without FLAG_DIGEST.
 *
 * `stop` is checked every 256 KiB: once it is not 0 the move ends early, and its result is meaningless.
 */
uint64_t native_move(const uint8_t *source_base, const struct run *source_runs, uint8_t *target_base,
                     const struct run *target_runs, uint64_t total, const volatile int32_t *stop, uint32_t flags) {
    struct move move;
    struct cursor source = {.base = (uint8_t *)source_base}, target = {.base = target_base};
    struct lanes lanes = {.count = 0};
    uint64_t until_look = 0, left = total;
    start(&move, total, flags);
    if (total > 0) enter(&source, source_runs), enter(&target, target_runs);
    struct cursor ahead = source;
    uint64_t unfetched = pass(&ahead, AHEAD_BYTES, total, 1);
    while (left > 0) {
        if (until_look == 0) {
            if (*stop) break;
            until_look = LOOK_BYTES;
        }
        uint64_t count = source.left < target.left ? source.left : target.left;
        if (count > until_look) count = until_look;
        int digest = (flags & FLAG_DIGEST) != 0, side_by_side = !digest && move.streamed && count >= LANE_MIN_BYTES;
        uint64_t step = side_by_side ? LANE_BYTES : STEP_BYTES;
        if (count > step) count = step;
        unfetched = pass(&ahead, count, unfetched, !side_by_side);
        if (digest)
            add(&move, target.at, source.at, count);
        else
            copy(&move, &lanes, target.at, source.at, count);
        left -= count, until_look -= count;
        advance(&source, count, left > 0);
        advance(&target, count, left > 0);
    }
    copy_lanes(move.kernel, &lanes);
    if (move.streamed) fence();
    return left == 0 && flags & FLAG_DIGEST ? finish(&move) : 0;
}
