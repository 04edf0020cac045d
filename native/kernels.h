/* The stripe loops: plain C everywhere, SSE2, AVX2 and AVX512 on x86-64, NEON on aarch64; chosen at run time. */

#ifndef NATIVE_KERNELS_H
#define NATIVE_KERNELS_H

#include "xxh3.h"

enum store { STORE_NOWHERE, STORE_PLAIN, STORE_STREAM };

/* The state of a digest of more than 240 bytes between two calls. */
struct stream {
    _Alignas(64) uint64_t lanes[8];
    unsigned phase; /* stripes since the last scramble, 0..15 */
};

typedef void stripes_function(struct stream *, uint8_t *to, const uint8_t *from, size_t stripes);

/* The functions of one instruction set. `stream_*` need `to` aligned to 64 bytes. */
struct kernel {
    stripes_function *digest, *copy_digest, *stream_digest;
    void (*stream_copy)(uint8_t *to, const uint8_t *from, size_t stripes);
};

#if defined(__clang__)
#define UNROLL16 _Pragma("clang loop unroll_count(16)")
#else
#define UNROLL16 _Pragma("GCC unroll 16")
#endif

/* Plain C: a vector is a pair of words. */
typedef struct {
    uint64_t a, b;
} pair;

static inline pair pair_load(const void *at) {
    pair value;
    memcpy(&value, at, sizeof value);
    return value;
}

#define ISA plain
#define TARGET
#define vec pair
#define VECS 4
#define LOAD(at) pair_load(at)
#define STORE(at, v) memcpy(at, &(v), sizeof(pair))
#define STREAM STORE
#define XOR(x, y) ((pair){(x).a ^ (y).a, (x).b ^ (y).b})
#define ADD(x, y) ((pair){(x).a + (y).a, (x).b + (y).b})
#define HIGH(v) ((pair){(v).a >> 32, (v).b >> 32})
#define LOW_PRODUCT(x, y) ((pair){((x).a & 0xFFFFFFFFu) * (y).a, ((x).b & 0xFFFFFFFFu) * (y).b})
#define SWAP(v) ((pair){(v).b, (v).a})
#define SHIFT47(v) ((pair){(v).a >> 47, (v).b >> 47})
#define TIMES_P32(v) ((pair){(v).a * P32_1, (v).b * P32_1})
#include "stripes.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define ISA sse2
#define TARGET
#define vec __m128i
#define VECS 4
#define LOAD(at) _mm_loadu_si128((const void *)(at))
#define STORE(at, v) _mm_storeu_si128((void *)(at), v)
#define STREAM(at, v) _mm_stream_si128((void *)(at), v)
#define XOR _mm_xor_si128
#define ADD _mm_add_epi64
#define HIGH(v) _mm_srli_epi64(v, 32)
#define LOW_PRODUCT _mm_mul_epu32
#define SWAP(v) _mm_shuffle_epi32(v, 0x4E)
#define SHIFT47(v) _mm_srli_epi64(v, 47)
#define TIMES_P32(v)                                            \
    _mm_add_epi64(_mm_mul_epu32(v, _mm_set1_epi64x((long long)P32_1)), \
                  _mm_slli_epi64(_mm_mul_epu32(HIGH(v), _mm_set1_epi64x((long long)P32_1)), 32))
#include "stripes.h"

#define ISA avx2
#define TARGET __attribute__((target("avx2")))
#define vec __m256i
#define VECS 2
#define LOAD(at) _mm256_loadu_si256((const void *)(at))
#define STORE(at, v) _mm256_storeu_si256((void *)(at), v)
#define STREAM(at, v) _mm256_stream_si256((void *)(at), v)
#define XOR _mm256_xor_si256
#define ADD _mm256_add_epi64
#define HIGH(v) _mm256_srli_epi64(v, 32)
#define LOW_PRODUCT _mm256_mul_epu32
#define SWAP(v) _mm256_shuffle_epi32(v, 0x4E)
#define SHIFT47(v) _mm256_srli_epi64(v, 47)
#define TIMES_P32(v)                                                  \
    _mm256_add_epi64(_mm256_mul_epu32(v, _mm256_set1_epi64x((long long)P32_1)), \
                     _mm256_slli_epi64(_mm256_mul_epu32(HIGH(v), _mm256_set1_epi64x((long long)P32_1)), 32))
#include "stripes.h"

#define ISA avx512
#define TARGET __attribute__((target("avx512f")))
#define vec __m512i
#define VECS 1
#define LOAD(at) _mm512_loadu_si512((const void *)(at))
#define STORE(at, v) _mm512_storeu_si512((void *)(at), v)
#define STREAM(at, v) _mm512_stream_si512((void *)(at), v)
#define XOR _mm512_xor_si512
#define ADD _mm512_add_epi64
#define HIGH(v) _mm512_srli_epi64(v, 32)
#define LOW_PRODUCT _mm512_mul_epu32
#define SWAP(v) _mm512_shuffle_epi32(v, (_MM_PERM_ENUM)0x4E)
#define SHIFT47(v) _mm512_srli_epi64(v, 47)
#define TIMES_P32(v)                                                  \
    _mm512_add_epi64(_mm512_mul_epu32(v, _mm512_set1_epi64((long long)P32_1)), \
                     _mm512_slli_epi64(_mm512_mul_epu32(HIGH(v), _mm512_set1_epi64((long long)P32_1)), 32))
#include "stripes.h"

static inline void fence(void) { _mm_sfence(); } /* makes streamed stores visible before later stores */

#elif defined(__aarch64__)
#include <arm_neon.h>

#define ISA neon
#define TARGET
#define vec uint64x2_t
#define VECS 4
#define LOAD(at) vreinterpretq_u64_u8(vld1q_u8((const uint8_t *)(at)))
#define STORE(at, v) vst1q_u8((uint8_t *)(at), vreinterpretq_u8_u64(v))
#define STREAM STORE /* C has no such store here */
#define XOR veorq_u64
#define ADD vaddq_u64
#define HIGH(v) vshrq_n_u64(v, 32)
#define LOW_PRODUCT(x, y) vmull_u32(vmovn_u64(x), vmovn_u64(y))
#define SWAP(v) vextq_u64(v, v, 1)
#define SHIFT47(v) vshrq_n_u64(v, 47)
#define TIMES_P32(v)                                            \
    vaddq_u64(vmull_u32(vmovn_u64(v), vdup_n_u32((uint32_t)P32_1)), \
              vshlq_n_u64(vmull_u32(vshrn_n_u64(v, 32), vdup_n_u32((uint32_t)P32_1)), 32))
#include "stripes.h"

static inline void fence(void) {}

#else
static inline void fence(void) {}
#endif

enum { NUM_KERNELS = 4 };

/* Kernel `number`, the higher the better; NULL if this CPU does not support it. */
static const struct kernel *kernel_of(unsigned number) {
#if defined(__x86_64__)
    switch (number) {
        case 1: return &kernel_sse2;
        case 2: return __builtin_cpu_supports("avx2") ? &kernel_avx2 : NULL;
        case 3: return __builtin_cpu_supports("avx512f") ? &kernel_avx512 : NULL;
    }
#elif defined(__aarch64__)
    if (number == 1) return &kernel_neon;
#endif
    return number == 0 ? &kernel_plain : NULL;
}

#endif
