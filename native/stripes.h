/* The stripe loop for one instruction set; included once for each, after these are defined:
 *
 *     ISA, TARGET    a suffix for names, the function attribute that allows the instructions
 *     vec, VECS      a vector, how many of them are one stripe of 64 bytes
 *     LOAD STORE STREAM XOR ADD HIGH LOW_PRODUCT SWAP SHIFT47 TIMES_P32
 *
 * STREAM bypasses the caches and needs an address aligned to 64. Each byte of `from` is read once, so the digest is of
 * the bytes written, even if the owner of `from` writes there at the same time.
 */

#define GLUE2(a, b) a##_##b
#define GLUE(a, b) GLUE2(a, b)
#define NAME(what) GLUE(what, ISA)

TARGET static inline __attribute__((always_inline)) void NAME(add)(
    vec acc[VECS], uint8_t *to, const uint8_t *from, const uint8_t *secret, const enum store store) {
    for (int i = 0; i < VECS; i++) {
        const size_t at = i * (STRIPE / VECS);
        vec value = LOAD(from + at);
        if (store == STORE_PLAIN) STORE(to + at, value);
        if (store == STORE_STREAM) STREAM(to + at, value);
        vec key = XOR(value, LOAD(secret + at));
        acc[i] = ADD(ADD(acc[i], SWAP(value)), LOW_PRODUCT(key, HIGH(key)));
    }
}

TARGET static inline __attribute__((always_inline)) void NAME(scramble)(vec acc[VECS]) {
    for (int i = 0; i < VECS; i++) {
        vec mixed = XOR(XOR(acc[i], SHIFT47(acc[i])), LOAD(SECRET + sizeof SECRET - STRIPE + i * (STRIPE / VECS)));
        acc[i] = TIMES_P32(mixed);
    }
}

TARGET static inline __attribute__((always_inline)) void NAME(loop)(
    struct stream *stream, uint8_t *to, const uint8_t *from, size_t count, const enum store store) {
    vec acc[VECS];
    unsigned phase = stream->phase;
    for (int i = 0; i < VECS; i++) acc[i] = LOAD(stream->lanes + i * (8 / VECS));
    while (count > 0) {
        if (phase == 0 && count >= BLOCK_STRIPES) {
            UNROLL16
            for (unsigned n = 0; n < BLOCK_STRIPES; n++)
                NAME(add)(acc, to + n * STRIPE, from + n * STRIPE, SECRET + 8 * n, store);
            NAME(scramble)(acc);
            from += BLOCK_STRIPES * STRIPE, to += BLOCK_STRIPES * STRIPE, count -= BLOCK_STRIPES;
            continue;
        }
        NAME(add)(acc, to, from, SECRET + 8 * phase, store);
        from += STRIPE, to += STRIPE, count--;
        if (++phase == BLOCK_STRIPES) {
            NAME(scramble)(acc);
            phase = 0;
        }
    }
    stream->phase = phase;
    for (int i = 0; i < VECS; i++) STORE(stream->lanes + i * (8 / VECS), acc[i]);
}

TARGET static void NAME(digest)(struct stream *stream, uint8_t *to, const uint8_t *from, size_t count) {
    NAME(loop)(stream, to, from, count, STORE_NOWHERE);
}

TARGET static void NAME(copy_digest)(struct stream *stream, uint8_t *to, const uint8_t *from, size_t count) {
    NAME(loop)(stream, to, from, count, STORE_PLAIN);
}

TARGET static void NAME(stream_digest)(struct stream *stream, uint8_t *to, const uint8_t *from, size_t count) {
    NAME(loop)(stream, to, from, count, STORE_STREAM);
}

TARGET static void NAME(stream_copy)(uint8_t *to, const uint8_t *from, size_t count) {
    for (; count > 0; count--, to += STRIPE, from += STRIPE) {
        vec values[VECS];
        for (int i = 0; i < VECS; i++) values[i] = LOAD(from + i * (STRIPE / VECS));
        for (int i = 0; i < VECS; i++) STREAM(to + i * (STRIPE / VECS), values[i]);
    }
}

static const struct kernel NAME(kernel) = {NAME(digest), NAME(copy_digest), NAME(stream_digest), NAME(stream_copy)};

#undef ISA
#undef TARGET
#undef vec
#undef VECS
#undef LOAD
#undef STORE
#undef STREAM
#undef XOR
#undef ADD
#undef HIGH
#undef LOW_PRODUCT
#undef SWAP
#undef SHIFT47
#undef TIMES_P32
#undef NAME
#undef GLUE
#undef GLUE2
