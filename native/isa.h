/* Instruction sets beyond the platform's baseline, selected at run time.
 *
 * A function for one of them has its target attribute, so one build works on all machines of one platform.
 */

#ifndef NATIVE_ISA_H
#define NATIVE_ISA_H

#include <stdint.h>

enum isa { ISA_PLAIN, ISA_AVX2, ISA_AVX512, ISA_AVX512_BF16, NUM_ISAS };

/* Compilers before GCC 10 and clang 9 support neither AVX512-BF16 nor AMX; WITHOUT_AVX512_BF16 builds as they do. */
#if defined(__x86_64__) && defined(__has_include) && !defined(WITHOUT_AVX512_BF16)
#if __has_include(<avx512bf16intrin.h>)
#define HAS_AVX512_BF16
#endif
#endif

#if defined(__x86_64__)
#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#endif
#if defined(HAS_AVX512_BF16)
#define TARGET_AVX512_BF16 __attribute__((target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#endif

/* Return whether this CPU, its operating system and the compiler support the instructions of `isa`. */
int isa_is_here(enum isa isa);

#endif
