/* draw.c with and without vectors that are converted: prints what it draws from rows of odd numbers. */

#include <stdio.h>

#include "isa.c"
#include "draw.c"

enum { ROWS = 40, COLUMNS = 1003 };

enum isa threads_isa(const struct threads *threads) {
    (void)threads;
    return isa_is_here(ISA_AVX512) ? ISA_AVX512 : isa_is_here(ISA_AVX2) ? ISA_AVX2 : ISA_PLAIN;
}

void threads_run(struct threads *threads, region_function *region, void *context) {
    (void)threads;
    region(context, 0, 1);
}

int main(void) {
    static float rows[ROWS * COLUMNS];
    struct draw draws[ROWS];
    int64_t columns[ROWS];
    uint32_t number = 1;
    for (size_t i = 0; i < ROWS * COLUMNS; i++) {
        number = number * 1664525 + 1013904223;
        rows[i] = (float)(number >> 8) / (1 << 21) - 4;
    }
    for (uint32_t i = 0; i < ROWS; i++) draws[i] = (struct draw){i, 0, 7, 0.5f + (float)i / 20, 0.9f, 0.001f, 300, i, 0};
    if (draw_from_rows(NULL, rows, COLUMNS, COLUMNS, draws, ROWS, columns)) return 1;
    for (size_t i = 0; i < ROWS; i++) printf("%d ", (int)columns[i]);
    return 0;
}
