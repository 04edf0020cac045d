/* Vectors of sixteen floats for each instruction set, for linear_kernels.h, which is included once for each.
 *
 * Sums kept in registers at once: of ROWS rows (float32 weights) or WIDE_ROWS rows (bfloat16 weights, which need
 * registers for widening) by one panel of columns; of up to PAIR_ROWS rows by both panels of a pair.
 */

#include <math.h>
#include <string.h>

#include "linear.h"

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(name) JOIN(name, ISA)
#define OP static inline __attribute__((always_inline)) TARGET

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* Plain C: loops that a compiler may vectorise. */
#define ISA plain
#define TARGET
#define ROWS 4
#define WIDE_ROWS 4
#define PAIR_ROWS 0
typedef struct {
    float at[PANEL];
} plain16;
typedef struct {
    uint32_t at[PANEL];
} plain_raw;
#define vec plain16
#define raw plain_raw
#define EACH(body)                  \
    do {                            \
        plain16 out;                \
        for (int i = 0; i < PANEL; i++) out.at[i] = (body); \
        return out;                 \
    } while (0)
static inline uint32_t plain_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
static inline float plain_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline float plain_fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
OP vec NAME(load)(const float *from) { EACH(from[i]); }
OP void NAME(store)(float *to, vec v) { memcpy(to, v.at, sizeof v.at); }
OP raw NAME(load_raw)(const void *from) {
    raw out;
    memcpy(out.at, from, sizeof out.at);
    return out;
}
OP vec NAME(low)(raw r) { EACH(plain_float(r.at[i] << 16)); }
OP vec NAME(high)(raw r) { EACH(plain_float(r.at[i] & 0xFFFF0000u)); }
OP vec NAME(all)(float x) { EACH(x); }
OP vec NAME(fma)(vec a, vec b, vec c) { EACH(plain_fma(a.at[i], b.at[i], c.at[i])); }
OP vec NAME(add)(vec a, vec b) { EACH(a.at[i] + b.at[i]); }
OP vec NAME(sub)(vec a, vec b) { EACH(a.at[i] - b.at[i]); }
OP vec NAME(mul)(vec a, vec b) { EACH(a.at[i] * b.at[i]); }
OP vec NAME(div)(vec a, vec b) { EACH(a.at[i] / b.at[i]); }
OP vec NAME(clamp)(vec a, float low, float high) { EACH(a.at[i] < low ? low : a.at[i] > high ? high : a.at[i]); }
OP vec NAME(nearest)(vec a) { EACH(nearbyintf(a.at[i])); }
OP vec NAME(power_of_two)(vec a) {
    EACH(plain_float((uint32_t)((int32_t)(a.at[i] == a.at[i] ? a.at[i] : 0.0f) + 127) << 23));
}
OP vec NAME(round)(vec a) { EACH(round_one(a.at[i])); }
OP void NAME(store_high)(uint16_t *to, vec a) {
    for (int i = 0; i < PANEL; i++) to[i] = (uint16_t)(plain_bits(a.at[i]) >> 16);
}
#include "linear_kernels.h"
#include "norms_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

typedef struct {
    __m256 a, b;
} two256;
typedef struct {
    __m256i a, b;
} two256i;

#define ISA avx2
#define TARGET TARGET_AVX2
#define ROWS 6
#define WIDE_ROWS 5
#define PAIR_ROWS 2
#define vec two256
#define raw two256i
OP vec NAME(load)(const float *from) { return (vec){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
OP void NAME(store)(float *to, vec v) { _mm256_storeu_ps(to, v.a), _mm256_storeu_ps(to + 8, v.b); }
OP raw NAME(load_raw)(const void *from) {
    const __m256i *at = from;
    return (raw){_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
OP __m256 NAME(low_half)(__m256i r) { return _mm256_castsi256_ps(_mm256_slli_epi32(r, 16)); }
OP __m256 NAME(high_half)(__m256i r) {
    return _mm256_castsi256_ps(_mm256_and_si256(r, _mm256_set1_epi32((int)0xFFFF0000)));
}
OP vec NAME(low)(raw r) { return (vec){NAME(low_half)(r.a), NAME(low_half)(r.b)}; }
OP vec NAME(high)(raw r) { return (vec){NAME(high_half)(r.a), NAME(high_half)(r.b)}; }
OP vec NAME(all)(float x) { return (vec){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
OP vec NAME(fma)(vec a, vec b, vec c) { return (vec){_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)}; }
OP vec NAME(add)(vec a, vec b) { return (vec){_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
OP vec NAME(sub)(vec a, vec b) { return (vec){_mm256_sub_ps(a.a, b.a), _mm256_sub_ps(a.b, b.b)}; }
OP vec NAME(mul)(vec a, vec b) { return (vec){_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
OP vec NAME(div)(vec a, vec b) { return (vec){_mm256_div_ps(a.a, b.a), _mm256_div_ps(a.b, b.b)}; }
OP __m256 NAME(clamp_half)(__m256 a, float low, float high) {
    return _mm256_min_ps(_mm256_set1_ps(high), _mm256_max_ps(_mm256_set1_ps(low), a));
}
OP vec NAME(clamp)(vec a, float low, float high) {
    return (vec){NAME(clamp_half)(a.a, low, high), NAME(clamp_half)(a.b, low, high)};
}
OP vec NAME(nearest)(vec a) {
    return (vec){_mm256_round_ps(a.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                 _mm256_round_ps(a.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
OP __m256 NAME(power_half)(__m256 a) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127)), 23));
}
OP vec NAME(power_of_two)(vec a) { return (vec){NAME(power_half)(a.a), NAME(power_half)(a.b)}; }
OP __m256 NAME(round_half)(__m256 a) {
    __m256i bits = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i none = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); /* all bits set for NaN, also a NaN */
    bits = _mm256_or_si256(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), none);
    return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32((int)0xFFFF0000)));
}
OP vec NAME(round)(vec a) { return (vec){NAME(round_half)(a.a), NAME(round_half)(a.b)}; }
OP void NAME(store_high)(uint16_t *to, vec a) {
    __m256i low = _mm256_srli_epi32(_mm256_castps_si256(a.a), 16);
    __m256i high = _mm256_srli_epi32(_mm256_castps_si256(a.b), 16);
    _mm256_storeu_si256((void *)to, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8));
}
#include "linear_kernels.h"
#include "norms_kernels.h"

#define ISA avx512
#define TARGET TARGET_AVX512
#define ROWS 12
#define WIDE_ROWS 12
#define PAIR_ROWS 12
#define vec __m512
#define raw __m512i
OP vec NAME(load)(const float *from) { return _mm512_loadu_ps(from); }
OP void NAME(store)(float *to, vec v) { _mm512_storeu_ps(to, v); }
OP raw NAME(load_raw)(const void *from) { return _mm512_loadu_si512(from); }
OP vec NAME(low)(raw r) { return _mm512_castsi512_ps(_mm512_slli_epi32(r, 16)); }
OP vec NAME(high)(raw r) { return _mm512_castsi512_ps(_mm512_and_si512(r, _mm512_set1_epi32((int)0xFFFF0000))); }
OP vec NAME(all)(float x) { return _mm512_set1_ps(x); }
OP vec NAME(fma)(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
OP vec NAME(add)(vec a, vec b) { return _mm512_add_ps(a, b); }
OP vec NAME(sub)(vec a, vec b) { return _mm512_sub_ps(a, b); }
OP vec NAME(mul)(vec a, vec b) { return _mm512_mul_ps(a, b); }
OP vec NAME(div)(vec a, vec b) { return _mm512_div_ps(a, b); }
OP vec NAME(clamp)(vec a, float low, float high) {
    return _mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), a));
}
OP vec NAME(nearest)(vec a) { return _mm512_roundscale_ps(a, 0x08); }
OP vec NAME(power_of_two)(vec a) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127)), 23));
}
OP vec NAME(round)(vec a) {
    __m512i bits = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000); /* all bits set is a NaN */
    bits = _mm512_and_si512(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), upper);
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), upper));
}
OP void NAME(store_high)(uint16_t *to, vec a) {
    _mm256_storeu_si256((void *)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(a), 16)));
}
#include "linear_kernels.h"
#include "norms_kernels.h"
#endif
