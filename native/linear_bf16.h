/* Products of bfloat16 rows with special instructions: AVX512-BF16's pairwise dot product, and AMX's tiles.
 *
 * A dot product takes one line of packed weights (16 columns of two k) and a row's same two values, broadcast. AMX
 * multiplies 16 rows of 32 values by 16 such lines: k rises by 32; a pair of panels by 32 rows is four tiles of sums.
 */

#define DOT_ROWS(count)                                                                            \
    case count: {                                                                                  \
        __m512 sums_[count][2];                                                                    \
        UNROLL for (int r = 0; r < (count); r++) sums_[r][0] = sums_[r][1] = _mm512_setzero_ps();  \
        for (size_t i = 0; i < linear->k; i += 2, from += 2 * PAIR) {                              \
            __m512bh first = (__m512bh)_mm512_loadu_si512(from);                                   \
            __m512bh second = (__m512bh)_mm512_loadu_si512(from + 2 * PANEL);                      \
            __builtin_prefetch(from + AHEAD / 2), __builtin_prefetch(from + 2 * PANEL + AHEAD / 2); \
            UNROLL for (int r = 0; r < (count); r++) {                                             \
                int both;                                                                          \
                memcpy(&both, at + r * stride + i, sizeof both);                                   \
                __m512bh value = (__m512bh)_mm512_set1_epi32(both);                                \
                sums_[r][0] = _mm512_dpbf16_ps(sums_[r][0], first, value);                         \
                sums_[r][1] = _mm512_dpbf16_ps(sums_[r][1], second, value);                        \
            }                                                                                      \
        }                                                                                          \
        UNROLL for (int r = 0; r < (count); r++) {                                                 \
            _mm512_storeu_ps(sums + r * PAIR, sums_[r][0]);                                        \
            _mm512_storeu_ps(sums + r * PAIR + PANEL, sums_[r][1]);                                \
        }                                                                                          \
        break;                                                                                     \
    }

TARGET_AVX512_BF16 static void tile_dot(const struct linear *linear, size_t pair, const void *rows, size_t stride,
                                        unsigned num_rows, float *sums) {
    const uint16_t *from = (const uint16_t *)linear->weights + pair * linear->k * PAIR, *at = rows;
    switch (num_rows) {
        DOT_ROWS(1) DOT_ROWS(2) DOT_ROWS(3) DOT_ROWS(4) DOT_ROWS(5) DOT_ROWS(6)
        DOT_ROWS(7) DOT_ROWS(8) DOT_ROWS(9) DOT_ROWS(10) DOT_ROWS(11) DOT_ROWS(12)
    }
}

static const struct linear_kernel kernel_avx512_bf16 = {
    FORMAT_BFLOAT16, TILE_ROWS, 1, NULL, NULL, tile_dot, finish_avx512, norm_avx512, rotate_avx512, add_rows_avx512,
    narrow_avx512,
};

#if defined(__linux__) && defined(__has_include)
#if __has_include(<amxbf16intrin.h>)
#define HAS_AMX
#endif
#endif

#if defined(HAS_AMX)
#include <sys/syscall.h>
#include <unistd.h>

#define TARGET_AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))

enum { AMX_ROWS = 16, AMX_K = 32, XFEATURE_TILE_DATA = 18, REQUEST_FEATURE = 0x1023 };

/* The layout that LDTILECFG reads: here every tile has 16 rows of 64 bytes. */
struct tile_config {
    uint8_t palette, start_row, unused[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
};

/* Whether CPU and system have AMX and let this process use it; the system call requests the permission. */
static int amx_is_here(void) {
    unsigned a = 7, b, c = 0, d;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    int has = (d >> 22 & 1) && (d >> 24 & 1); /* AMX-BF16, AMX-TILE */
    return has && syscall(SYS_arch_prctl, REQUEST_FEATURE, XFEATURE_TILE_DATA) == 0;
}

TARGET_AMX static void amx_begin(void) {
    _Alignas(64) struct tile_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.num_rows[tile] = AMX_ROWS;
    _tile_loadconfig(&config);
}

TARGET_AMX static void amx_end(void) { _tile_release(); }

/* Sums 0 to 3 of one pair for 32 rows, or 0 and 1 for 16: rows past `num_rows` are computed and ignored. */
TARGET_AMX static void tile_amx(const struct linear *linear, size_t pair, const void *rows, size_t stride,
                                unsigned num_rows, float *sums) {
    const uint8_t *from = (const uint8_t *)linear->weights + pair * linear->k * PAIR * 2, *at = rows;
    size_t row_bytes = stride * 2, both = num_rows > AMX_ROWS;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t i = 0; i < linear->k; i += AMX_K, from += AMX_K * PAIR * 2, at += AMX_K * 2) {
        for (size_t line = 0; line < AMX_K * PAIR * 2; line += 64) __builtin_prefetch(from + AHEAD + line);
        _tile_loadd(6, from, 2 * 64);
        _tile_loadd(7, from + 64, 2 * 64);
        _tile_loadd(4, at, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_loadd(5, at + AMX_ROWS * row_bytes, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, PAIR * 4);
    _tile_stored(1, sums + PANEL, PAIR * 4);
    if (both) {
        _tile_stored(2, sums + AMX_ROWS * PAIR, PAIR * 4);
        _tile_stored(3, sums + AMX_ROWS * PAIR + PANEL, PAIR * 4);
    }
}

static const struct linear_kernel kernel_amx = {
    FORMAT_BFLOAT16, 2 * AMX_ROWS, AMX_ROWS, amx_begin, amx_end, tile_amx, finish_avx512, norm_avx512, rotate_avx512,
    add_rows_avx512, narrow_avx512,
};
#endif
