#include "isa.h"

int isa_is_here(enum isa isa) {
    if (isa == ISA_PLAIN) return 1;
#if defined(__x86_64__)
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (isa == ISA_AVX2) return avx2;
    if (isa == ISA_AVX512) return avx512;
    if (isa == ISA_AVX512_BF16) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
    return 0;
}

/* Return which instruction sets this CPU has: bit n for enum isa n. */
uint32_t native_isas(void) {
    uint32_t found = 0;
    for (int isa = 0; isa < NUM_ISAS; isa++)
        if (isa_is_here((enum isa)isa)) found |= 1u << isa;
    return found;
}
