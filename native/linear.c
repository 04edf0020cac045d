/* Packing weights, and distributing a product's tiles over threads. The arithmetic is in linear_kernels.h. */

#define _GNU_SOURCE
#include "linear.h"

#include <string.h>
#if defined(HAS_AVX512_BF16)
#include <cpuid.h>
#endif

enum { AHEAD = 4096 };   /* prefetch distance of weights in bytes: one page */
enum { TILE_ROWS = 12 }; /* rows whose sums fit in AVX512's registers, with two vectors of columns each */

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float widen_one(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t narrow_one(float value) {
    uint32_t bits = bits_of(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0; /* NaN, which rounding could make infinite */
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static inline float round_one(float value) { return widen_one(narrow_one(value)); }

#include "linear_isa.h"

#if defined(HAS_AVX512_BF16)
#include "linear_bf16.h" /* it uses the functions around a product of the kernels above */
#endif

const struct linear_kernel *linear_kernel_number(unsigned number) {
#if defined(__x86_64__)
    switch (number) {
        case KERNEL_AVX2: return isa_is_here(ISA_AVX2) ? &kernel_avx2 : NULL;
        case KERNEL_AVX512: return isa_is_here(ISA_AVX512) ? &kernel_avx512 : NULL;
#if defined(HAS_AVX512_BF16)
        case KERNEL_AVX512_BF16: return isa_is_here(ISA_AVX512_BF16) ? &kernel_avx512_bf16 : NULL;
#endif
#if defined(HAS_AMX)
        case KERNEL_AMX: return isa_is_here(ISA_AVX512) && amx_is_here() ? &kernel_amx : NULL;
#endif
    }
#endif
    return number == KERNEL_PLAIN ? &kernel_plain : NULL;
}

const struct linear_kernel *linear_kernel_of(enum isa isa, uint32_t format) {
    int best = isa < ISA_AVX512_BF16 ? (int)isa : format == FORMAT_BFLOAT16 ? KERNEL_AMX : KERNEL_AVX512;
    while (linear_kernel_number((unsigned)best) == NULL) best--;
    return linear_kernel_number((unsigned)best);
}

/* Intel's cores with AVX512-FP16 (Sapphire Rapids and later) have AMX. Where a virtual machine hides it, their
 * AVX512-BF16 is slower than widening to float32: 166 against 304 GFLOP/s on two of them.
 */
static int is_made_for_amx(void) {
#if defined(HAS_AVX512_BF16)
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_INTEL_ebx || d != signature_INTEL_edx) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 23 & 1);
#else
    return 0;
#endif
}

uint32_t native_best_isa(void) {
    int best = NUM_ISAS - 1;
    while (!isa_is_here((enum isa)best)) best--;
    if (best == ISA_AVX512_BF16 && linear_kernel_number(KERNEL_AMX) == NULL && is_made_for_amx()) best = ISA_AVX512;
    return (uint32_t)best;
}

static void pack_panel(const struct packing *packing, size_t number) {
    size_t k = packing->k, column = number * PANEL, panel = packing->first + number * packing->step;
    size_t base = panel / 2 * k * PAIR, side = panel % 2, item = packing->format == FORMAT_FLOAT32 ? 4 : 2;
    size_t columns = column + PANEL <= packing->columns ? PANEL : packing->columns - column, together = 4 / item;
    uint8_t *to = (uint8_t *)packing->packed + base * item + side * PANEL * 4;
    const uint8_t *from = (const uint8_t *)packing->source + column * k * item;
    for (size_t i = 0; i < k; i += together, to += PAIR * 4) {
        for (size_t lane = 0; lane < columns; lane++) memcpy(to + lane * 4, from + (lane * k + i) * item, 4);
        memset(to + columns * 4, 0, (PANEL - columns) * 4);
    }
}

void linear_pack(const struct packing *packing, size_t start, size_t end) {
    for (size_t number = start; number < end; number++) pack_panel(packing, number);
}

void linear_unpack_row(const struct linear *linear, size_t column, float *row) {
    size_t panel = column / PANEL, lane = column % PANEL, base = panel / 2 * linear->k * PAIR, side = panel % 2;
    if (linear->format == FORMAT_FLOAT32) {
        const float *from = (const float *)linear->weights + base + side * PANEL + lane;
        for (size_t i = 0; i < linear->k; i++) row[i] = from[i * PAIR];
        return;
    }
    const uint16_t *from = (const uint16_t *)linear->weights + base + side * 2 * PANEL + 2 * lane;
    for (size_t i = 0; i < linear->k; i++) row[i] = widen_one(from[i / 2 * 2 * PAIR + i % 2]);
}

/* Part `index` of `count` equal parts of `total`. */
static size_t cut(size_t total, size_t index, size_t count) { return total * index / count; }

/* The same for rows, in whole units that a kernel computes together. */
static size_t cut_rows(const struct linear_kernel *kernel, size_t total, size_t index, size_t count) {
    size_t unit = kernel->row_unit, row = cut((total + unit - 1) / unit, index, count) * unit;
    return row < total ? row : total;
}

static const uint8_t *row_at(const struct linear_kernel *kernel, const void *rows, size_t stride, size_t row) {
    return (const uint8_t *)rows + row * stride * (kernel->row_format == FORMAT_BFLOAT16 ? 2 : 4);
}

static void run_block(const struct linear *linear, const struct linear_kernel *kernel, size_t pair, const void *rows,
                      size_t stride, size_t num_rows, float *out, size_t out_stride, int rounded) {
    _Alignas(64) float sums[MAX_TILE_ROWS * PAIR];
    size_t num_tiles = (num_rows + kernel->tile_rows - 1) / kernel->tile_rows;
    for (size_t tile = 0; tile < num_tiles; tile++) {
        size_t row = cut_rows(kernel, num_rows, tile, num_tiles), end = cut_rows(kernel, num_rows, tile + 1, num_tiles);
        kernel->tile(linear, pair, row_at(kernel, rows, stride, row), stride, (unsigned)(end - row), sums);
        kernel->finish(linear, pair, sums, (unsigned)(end - row), out + row * out_stride, out_stride, rounded);
    }
}

void linear_run(const struct linear *linear, const struct linear_kernel *kernel, const void *rows, size_t stride,
                size_t num_rows, float *out, size_t out_stride, int rounded, unsigned thread, unsigned num_threads) {
    size_t num_pairs = (linear->n + PAIR - 1) / PAIR, num_blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    size_t unit = cut(num_pairs * num_blocks, thread, num_threads);
    size_t last = cut(num_pairs * num_blocks, thread + 1, num_threads);
    if (kernel->begin != NULL) kernel->begin();
    for (; unit < last; unit++) {
        size_t block = unit / num_pairs, row = cut_rows(kernel, num_rows, block, num_blocks);
        size_t count = cut_rows(kernel, num_rows, block + 1, num_blocks) - row;
        run_block(linear, kernel, unit % num_pairs, row_at(kernel, rows, stride, row), stride, count,
                  out + row * out_stride, out_stride, rounded);
    }
    if (kernel->end != NULL) kernel->end();
}
