#include "isa.h"

#if defined(HAS_AVX512_BF16)
#include <cpuid.h>

/* Queried with CPUID: not every compiler that supports the instructions knows their name for __builtin_cpu_supports. */
static int cpu_has_avx512_bf16(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
#endif

int isa_is_here(enum isa isa) {
    if (isa == ISA_PLAIN) return 1;
#if defined(__x86_64__)
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (isa == ISA_AVX2) return avx2;
    if (isa == ISA_AVX512) return avx512;
#if defined(HAS_AVX512_BF16)
    if (isa == ISA_AVX512_BF16) return avx512 && cpu_has_avx512_bf16();
#endif
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
