/* XXH3, 64 bits, seed 0, default secret: everything but the stripe loop, written from the published specification
 * (xxhash_spec.md of the xxHash project). Little-endian machines only. */

#ifndef NATIVE_XXH3_H
#define NATIVE_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the digest is written for little-endian machines"
#endif

enum { STRIPE = 64, BLOCK_STRIPES = 16, SHORT_MAX = 240 };

static const uint64_t P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
static const uint64_t P64_1 = 0x9E3779B185EBCA87u, P64_2 = 0xC2B2AE3D27D4EB4Fu, P64_3 = 0x165667B19E3779F9u,
                      P64_4 = 0x85EBCA77C2B2AE63u, P64_5 = 0x27D4EB2F165667C5u;

/* The default secret is a constant of the format. */
static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t read32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint64_t read64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint64_t rotate(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

static inline uint64_t multiply_fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t h) {
    h = (h ^ h >> 37) * 0x165667919E3779F9u;
    return h ^ h >> 32;
}

static inline uint64_t avalanche_short(uint64_t h) {
    h = (h ^ h >> 33) * P64_2;
    h = (h ^ h >> 29) * P64_3;
    return h ^ h >> 32;
}

static inline uint64_t mix16(const uint8_t *data, const uint8_t *secret) {
    return multiply_fold(read64(data) ^ read64(secret), read64(data + 8) ^ read64(secret + 8));
}

/* The digest of 0..240 bytes. */
static uint64_t digest_short(const uint8_t *data, size_t length) {
    const uint8_t *end = data + length;
    if (length == 0) return avalanche_short(read64(SECRET + 56) ^ read64(SECRET + 64));
    if (length <= 3) {
        uint64_t all = (uint64_t)data[0] << 16 | (uint64_t)data[length / 2] << 24 | end[-1] | (uint64_t)length << 8;
        return avalanche_short(all ^ read32(SECRET) ^ read32(SECRET + 4));
    }
    if (length <= 8) {
        uint64_t h = (read32(end - 4) + (read32(data) << 32)) ^ read64(SECRET + 8) ^ read64(SECRET + 16);
        h = (h ^ rotate(h, 49) ^ rotate(h, 24)) * 0x9FB21C651E98DF25u;
        h = (h ^ ((h >> 35) + length)) * 0x9FB21C651E98DF25u;
        return h ^ h >> 28;
    }
    if (length <= 16) {
        uint64_t low = read64(data) ^ read64(SECRET + 24) ^ read64(SECRET + 32);
        uint64_t high = read64(end - 8) ^ read64(SECRET + 40) ^ read64(SECRET + 48);
        return avalanche(length + __builtin_bswap64(low) + high + multiply_fold(low, high));
    }
    uint64_t sum = length * P64_1;
    if (length <= 128) { /* pairs from both ends towards the middle */
        for (size_t pair = (length - 1) / 32 + 1; pair-- > 0;)
            sum += mix16(data + 16 * pair, SECRET + 32 * pair) + mix16(end - 16 * (pair + 1), SECRET + 32 * pair + 16);
        return avalanche(sum);
    }
    for (size_t i = 0; i < 8; i++) sum += mix16(data + 16 * i, SECRET + 16 * i);
    sum = avalanche(sum);
    for (size_t i = 8; i < length / 16; i++) sum += mix16(data + 16 * i, SECRET + 16 * (i - 8) + 3);
    return avalanche(sum + mix16(end - 16, SECRET + 136 - 17));
}

/* The initial eight lanes of a digest of more than 240 bytes. */
static inline void lanes_start(uint64_t lanes[8]) {
    const uint64_t start[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    memcpy(lanes, start, sizeof start);
}

/* One stripe of 64 bytes; the stripe loops in stripes.h do the same with vectors. */
static inline void lanes_add(uint64_t lanes[8], const uint8_t *data, const uint8_t *secret) {
    for (int i = 0; i < 8; i++) {
        uint64_t value = read64(data + 8 * i), key = value ^ read64(secret + 8 * i);
        lanes[i ^ 1] += value;
        lanes[i] += (key & 0xFFFFFFFFu) * (key >> 32);
    }
}

/* The final digest from the lanes, after the last stripe. */
static inline uint64_t lanes_finish(const uint64_t lanes[8], uint64_t length) {
    uint64_t sum = length * P64_1;
    for (int i = 0; i < 4; i++)
        sum += multiply_fold(lanes[2 * i] ^ read64(SECRET + 11 + 16 * i),
                             lanes[2 * i + 1] ^ read64(SECRET + 19 + 16 * i));
    return avalanche(sum);
}

#endif
