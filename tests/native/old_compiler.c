/* linear.c as a compiler without AVX512-BF16 and AMX takes it: their names end the compilation.
 *
 * Ends with 0 if the next best kernel takes their place.
 */

#define _GNU_SOURCE
#define WITHOUT_AVX512_BF16
#include <immintrin.h>
#pragma GCC poison __m512bh _mm512_dpbf16_ps _tile_dpbf16ps _tile_loadd _tile_stored _tile_zero _tile_release

#include "isa.c"
#include "linear.c"

int main(void) {
    const struct linear_kernel *best = isa_is_here(ISA_AVX512) ? &kernel_avx512
                                       : isa_is_here(ISA_AVX2) ? &kernel_avx2
                                                               : &kernel_plain;
    return isa_is_here(ISA_AVX512_BF16) || linear_kernel_number(KERNEL_AVX512_BF16) != NULL ||
           linear_kernel_number(KERNEL_AMX) != NULL || linear_kernel_of(ISA_AVX512, FORMAT_BFLOAT16) != best ||
           linear_kernel_of(ISA_AVX512_BF16, FORMAT_BFLOAT16) != best;
}
