/* The vectors of each instruction set, and the loops of attention_loops.h for each of them. */

#include "attention_kernel.h"

#include <math.h>
#include <string.h>

#define GLUE2(a, b) a##_##b
#define GLUE(a, b) GLUE2(a, b)
#define NAME(what) GLUE(what, ISA)
#define INLINE static inline __attribute__((always_inline))

/* Plain C: four floats, which every platform has registers for. */
typedef float plain4 __attribute__((vector_size(16)));
typedef int32_t plain4i __attribute__((vector_size(16)));

static inline plain4 plain_load(const float *at) {
    plain4 value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline void plain_store(float *at, plain4 value) { memcpy(at, &value, sizeof value); }

static inline plain4 plain_widen(const uint16_t *at) {
    return (plain4){widen_bf16(at[0]), widen_bf16(at[1]), widen_bf16(at[2]), widen_bf16(at[3])};
}

static inline plain4 plain_select(plain4i mask, plain4 yes, plain4 no) {
    return (plain4)(((plain4i)yes & mask) | ((plain4i)no & ~mask));
}

#if defined(__aarch64__)
#include <arm_neon.h>
#define PLAIN_FMA(a, b, c) ((plain4)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define PLAIN_WIDE 4 /* 32 registers */
#else
#define PLAIN_FMA(a, b, c) ((a) * (b) + (c))
#define PLAIN_WIDE 2
#endif

#define ISA plain
#define TARGET
#define vec plain4
#define LANES 4
#define WIDE PLAIN_WIDE
#define SIDE 1
#define LOAD plain_load
#define STORE plain_store
#define SET(x) ((plain4){x, x, x, x})
#define WIDEN plain_widen
#define FMA PLAIN_FMA
#define MAX(a, b) plain_select((a) > (b), a, b)
#define TIMES_POWER(v, n, shifted) ((plain4)(((plain4i)(v) + ((plain4i)(shifted) << 23)) | ~((n) == (n))))
#define ZERO_BELOW(v, x, least) ((plain4)((plain4i)(v) & ~((x) < (least))))
#define SUM(v) (((v)[0] + (v)[2]) + ((v)[1] + (v)[3]))
#define LARGEST(v) fmaxf(fmaxf((v)[0], (v)[2]), fmaxf((v)[1], (v)[3]))
#define LOW_HALVES(v) ((plain4)((plain4i)(v) << 16))
#define HIGH_HALVES(v) ((plain4)((plain4i)(v) & (int32_t)0xFFFF0000))
#define TRANSPOSE(out, base, offsets)         \
    for (int word_ = 0; word_ < 4; word_++)   \
        for (int key_ = 0; key_ < 4; key_++)  \
            memcpy((char *)&out[word_] + 4 * key_, (base) + (offsets)[key_] + 4 * word_, 4);
#include "attention_loops.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define ISA avx2
#define TARGET TARGET_AVX2
#define vec __m256
#define LANES 8
#define WIDE 2
#define SIDE 1
#define LOAD _mm256_loadu_ps
#define STORE(at, v) _mm256_storeu_ps(at, v)
#define SET _mm256_set1_ps
#define WIDEN(at) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(at))), 16))
#define FMA _mm256_fmadd_ps
#define MAX _mm256_max_ps
#define TIMES_POWER(v, n, shifted)                                                                              \
    _mm256_or_ps(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v),                                   \
                                                      _mm256_slli_epi32(_mm256_castps_si256(shifted), 23))),    \
                 _mm256_cmp_ps(n, n, _CMP_UNORD_Q))
#define ZERO_BELOW(v, x, least) _mm256_andnot_ps(_mm256_cmp_ps(x, least, _CMP_LT_OQ), v)
#define SUM sum_avx2
#define LARGEST largest_avx2
#define LOW_HALVES(v) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 16))
#define HIGH_HALVES(v) _mm256_and_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32((int)0xFFFF0000)))
#define QUARTER(base, offset) _mm_loadu_ps((const float *)((base) + (offset)))
#define PAIR(base, offsets, key) \
    _mm256_insertf128_ps(_mm256_castps128_ps256(QUARTER(base, (offsets)[key])), QUARTER(base, (offsets)[key + 4]), 1)
#define TRANSPOSE(out, base, offsets)                                                                         \
    {                                                                                                         \
        vec a = PAIR(base, offsets, 0), b = PAIR(base, offsets, 1), c = PAIR(base, offsets, 2),               \
            d = PAIR(base, offsets, 3);                                                                       \
        __m256d e = _mm256_castps_pd(_mm256_unpacklo_ps(a, b)), f = _mm256_castps_pd(_mm256_unpackhi_ps(a, b)), \
                g = _mm256_castps_pd(_mm256_unpacklo_ps(c, d)), h = _mm256_castps_pd(_mm256_unpackhi_ps(c, d)); \
        out[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(e, g)), out[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(e, g)); \
        out[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(f, h)), out[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(f, h)); \
    }

TARGET INLINE float sum_avx2(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

TARGET INLINE float largest_avx2(__m256 v) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
#include "attention_loops.h"

#define ISA avx512
#define TARGET TARGET_AVX512
#define vec __m512
#define LANES 16
#define WIDE 4
#define SIDE 2
#define LOAD _mm512_loadu_ps
#define STORE(at, v) _mm512_storeu_ps(at, v)
#define SET _mm512_set1_ps
#define WIDEN(at) \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(at))), 16))
#define FMA _mm512_fmadd_ps
#define MAX _mm512_max_ps
#define TIMES_POWER(v, n, shifted) _mm512_scalef_ps(v, n)
#define ZERO_BELOW(v, x, least) _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), v)
#define SUM _mm512_reduce_add_ps
#define LARGEST _mm512_reduce_max_ps
#define LOW_HALVES(v) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 16))
#define HIGH_HALVES(v) _mm512_and_ps(v, _mm512_castsi512_ps(_mm512_set1_epi32((int)0xFFFF0000)))
#define FOUR(base, offsets, key)                                                                              \
    _mm512_insertf32x4(                                                                                       \
        _mm512_insertf32x4(                                                                                   \
            _mm512_insertf32x4(_mm512_castps128_ps512(QUARTER(base, (offsets)[key])),                         \
                               QUARTER(base, (offsets)[key + 4]), 1),                                         \
            QUARTER(base, (offsets)[key + 8]), 2),                                                            \
        QUARTER(base, (offsets)[key + 12]), 3)
#define TRANSPOSE(out, base, offsets)                                                                         \
    {                                                                                                         \
        vec a = FOUR(base, offsets, 0), b = FOUR(base, offsets, 1), c = FOUR(base, offsets, 2),               \
            d = FOUR(base, offsets, 3);                                                                       \
        __m512d e = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), f = _mm512_castps_pd(_mm512_unpackhi_ps(a, b)), \
                g = _mm512_castps_pd(_mm512_unpacklo_ps(c, d)), h = _mm512_castps_pd(_mm512_unpackhi_ps(c, d)); \
        out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(e, g)), out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(e, g)); \
        out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(f, h)), out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(f, h)); \
    }
#include "attention_loops.h"
#endif

const struct attention_kernel *attention_kernel_of(enum isa isa) {
#if defined(__x86_64__)
    if (isa == ISA_AVX512 || isa == ISA_AVX512_BF16) return &kernel_avx512;
    if (isa == ISA_AVX2) return &kernel_avx2;
#endif
    (void)isa;
    return &kernel_plain;
}
