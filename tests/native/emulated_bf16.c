/* linear_bf16.h with its instructions done in C, so that what it does with them is tested on every x86-64 CPU.
 *
 * Prints each product that is wrong; ends with 0 if none is.
 */

#define _GNU_SOURCE
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint8_t tiles[8][16][64];
static int is_configured;

static float widened(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void load_tile(int tile, const void *from, size_t stride) {
    if (!is_configured) abort();
    for (int row = 0; row < 16; row++) memcpy(tiles[tile][row], (const uint8_t *)from + row * stride, 64);
}

static void store_tile(int tile, void *to, size_t stride) {
    for (int row = 0; row < 16; row++) memcpy((uint8_t *)to + row * stride, tiles[tile][row], 64);
}

static void multiply_tiles(int sums, int rows, int weights) {
    float out[16][16];
    uint16_t a[16][32], b[16][32];
    memcpy(out, tiles[sums], 1024), memcpy(a, tiles[rows], 1024), memcpy(b, tiles[weights], 1024);
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 32; k++)
            for (int column = 0; column < 16; column++)
                out[row][column] += widened(a[row][k]) * widened(b[k / 2][2 * column + k % 2]);
    memcpy(tiles[sums], out, 1024);
}

/* Byte 0: palette 1; bytes 16..31: bytes a row, 16 bits each; bytes 48..55: rows. */
static void configure(const void *config) {
    const uint8_t *bytes = config;
    if (bytes[0] != 1) abort();
    for (int tile = 0; tile < 8; tile++)
        if (bytes[16 + 2 * tile] != 64 || bytes[17 + 2 * tile] != 0 || bytes[48 + tile] != 16) abort();
    is_configured = 1;
}

__attribute__((target("avx512f"))) static __m512 dot_pairs(__m512 sums, __m512bh first, __m512bh second) {
    float out[16];
    uint16_t a[32], b[32];
    memcpy(out, &sums, 64), memcpy(a, &first, 64), memcpy(b, &second, 64);
    for (int i = 0; i < 32; i++) out[i / 2] += widened(a[i]) * widened(b[i]);
    memcpy(&sums, out, 64);
    return sums;
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_loadconfig
#undef _tile_release
#define _tile_zero(tile) memset(tiles[tile], 0, 1024)
#define _tile_loadd load_tile
#define _tile_stored store_tile
#define _tile_dpbf16ps multiply_tiles
#define _tile_loadconfig configure
#define _tile_release() (is_configured = 0)
#define _mm512_dpbf16_ps dot_pairs
#include "isa.h"
#undef TARGET_AVX512_BF16
#define TARGET_AVX512_BF16 TARGET_AVX512
#include "linear.c"

enum { BEHIND = 32, GAP = 32 };

static uint16_t some(void) { return narrow_one((float)(rand() % 2001 - 1000) / 1000); }

/* Return how many columns of `num_rows` rows are wrong. */
static int check(const struct linear_kernel *kernel, size_t n, size_t k, size_t num_rows) {
    size_t padded = (n + 31) / 32 * 32, stride = (k + 31) / 32 * 32 + GAP;
    uint16_t *weights = malloc(n * k * 2), *packed = calloc(padded * (k + 32), 2);
    uint16_t *rows = calloc((num_rows + BEHIND) * stride, 2);
    float *out = malloc(num_rows * padded * sizeof(float));
    int wrong = 0;
    for (size_t i = 0; i < n * k; i++) weights[i] = some();
    for (size_t i = 0; i < num_rows * k; i++) rows[i / k * stride + i % k] = some();
    struct packing packing = {packed, weights, (uint32_t)n, (uint32_t)k, 0, 1, FORMAT_BFLOAT16};
    linear_pack(&packing, 0, (n + PANEL - 1) / PANEL);
    struct linear linear = {packed, NULL, (uint32_t)k, (uint32_t)n, FORMAT_BFLOAT16, FINISH_STORE};
    for (unsigned thread = 0; thread < 3; thread++)
        linear_run(&linear, kernel, rows, stride, num_rows, out, padded, 0, thread, 3);
    for (size_t row = 0; row < num_rows; row++)
        for (size_t column = 0; column < n; column++) {
            double sum = 0;
            for (size_t i = 0; i < k; i++) sum += (double)widened(rows[row * stride + i]) * widened(weights[column * k + i]);
            wrong += !(fabs(sum - out[row * padded + column]) < 1e-4);
        }
    free(weights), free(packed), free(rows), free(out);
    return wrong;
}

int main(void) {
    static const size_t shapes[][2] = {{16, 6}, {33, 64}, {96, 130}, {320, 64}};
    static const size_t row_counts[] = {1, 2, 5, 12, 13, 16, 17, 31, 33, 40, 97, 200};
    int failed = 0;
    for (size_t shape = 0; shape < 4; shape++)
        for (size_t i = 0; i < sizeof row_counts / sizeof *row_counts; i++)
            for (int amx = 0; amx < 2; amx++) {
                const struct linear_kernel *kernel = amx ? &kernel_amx : &kernel_avx512_bf16;
                int wrong = check(kernel, shapes[shape][0], shapes[shape][1], row_counts[i]);
                failed += wrong > 0;
                if (wrong > 0)
                    printf("%s, %zu rows of %zu, %zu columns: %d wrong\n", amx ? "amx" : "avx512_bf16", row_counts[i],
                           shapes[shape][1], shapes[shape][0], wrong);
            }
    return failed > 0;
}
