/* Products and the operations after them, for one instruction set; linear_isa.h has the definitions needed. */

#define VECS(count) ((count) <= PAIR_ROWS ? 2 : 1)

/* Sum `count` rows (a constant, so that the sums stay in registers) over all k for VECS(count) panels. */
#define TILE(count, expand)                                                                        \
    {                                                                                              \
        vec sums_[count][VECS(count)];                                                             \
        UNROLL for (int r = 0; r < (count); r++) UNROLL for (int v = 0; v < VECS(count); v++)      \
            sums_[r][v] = NAME(all)(0.0f);                                                         \
        expand;                                                                                    \
        UNROLL for (int r = 0; r < (count); r++) UNROLL for (int v = 0; v < VECS(count); v++)      \
            NAME(store)(sums + r * PAIR + v * PANEL, sums_[r][v]);                                 \
    }

#define TIMES(count, weights, column)                                                              \
    UNROLL for (int r = 0; r < (count); r++) {                                                     \
        vec value = NAME(all)(rows[r * stride + (column)]);                                        \
        UNROLL for (int v = 0; v < VECS(count); v++)                                               \
            sums_[r][v] = NAME(fma)(weights[v], value, sums_[r][v]);                               \
    }

#define SUM_BFLOAT16(count)                                                                        \
    for (size_t i = 0; i < k; i += 2, from += 2 * PAIR) {                                          \
        const uint16_t *at = from;                                                                 \
        raw both[VECS(count)];                                                                     \
        vec weights[VECS(count)];                                                                  \
        UNROLL for (int v = 0; v < VECS(count); v++) {                                             \
            both[v] = NAME(load_raw)(at + v * 2 * PANEL);                                          \
            __builtin_prefetch(at + v * 2 * PANEL + AHEAD / 2);                                    \
            weights[v] = NAME(low)(both[v]);                                                       \
        }                                                                                          \
        TIMES(count, weights, i)                                                                   \
        UNROLL for (int v = 0; v < VECS(count); v++) weights[v] = NAME(high)(both[v]);             \
        TIMES(count, weights, i + 1)                                                               \
    }

#define SUM_FLOAT32(count)                                                                         \
    for (size_t i = 0; i < k; i++, from += PAIR) {                                                 \
        const float *at = from;                                                                    \
        vec weights[VECS(count)];                                                                  \
        UNROLL for (int v = 0; v < VECS(count); v++) {                                             \
            weights[v] = NAME(load)(at + v * PANEL);                                               \
            __builtin_prefetch(at + v * PANEL + AHEAD / 4);                                        \
        }                                                                                          \
        TIMES(count, weights, i)                                                                   \
    }

#define CASE(count, sum)                                                                           \
    case count: TILE(count, sum(count)) break;
#define CASES_4(sum) CASE(1, sum) CASE(2, sum) CASE(3, sum) CASE(4, sum)
#define CASES_5(sum) CASES_4(sum) CASE(5, sum)
#define CASES_6(sum) CASES_5(sum) CASE(6, sum)
#define CASES_12(sum)                                                                              \
    CASES_6(sum) CASE(7, sum) CASE(8, sum) CASE(9, sum) CASE(10, sum) CASE(11, sum) CASE(12, sum)
#define CASES(rows) JOIN(CASES, rows)

TARGET static void NAME(sum_bfloat16)(const uint16_t *from, size_t k, const float *rows, size_t stride, unsigned count,
                                      float *sums) {
    switch (count) { CASES(WIDE_ROWS)(SUM_BFLOAT16) }
}

TARGET static void NAME(sum_float32)(const float *from, size_t k, const float *rows, size_t stride, unsigned count,
                                     float *sums) {
    switch (count) { CASES(ROWS)(SUM_FLOAT32) }
}

TARGET static void NAME(tile)(const struct linear *linear, size_t pair, const void *rows, size_t stride,
                              unsigned num_rows, float *sums) {
    size_t k = linear->k;
    unsigned most = linear->format == FORMAT_BFLOAT16 ? WIDE_ROWS : ROWS;
    for (unsigned row = 0; row < num_rows; row += most) {
        unsigned count = num_rows - row < most ? num_rows - row : most;
        for (unsigned column = 0; column < PAIR; column += VECS(count) * PANEL) {
            const float *from_rows = (const float *)rows + row * stride;
            float *to = sums + row * PAIR + column;
            if (linear->format == FORMAT_BFLOAT16)
                NAME(sum_bfloat16)((const uint16_t *)linear->weights + (pair * k * PAIR + 2 * column), k, from_rows,
                                   stride, count, to);
            else
                NAME(sum_float32)((const float *)linear->weights + (pair * k * PAIR + column), k, from_rows, stride,
                                  count, to);
        }
    }
}

/* e^x: 2^n times a polynomial of degree 6 in the rest; relative error under 2e-7 for x >= -86.6, to which x is limited.
 * Infinity from 88.73 on: one of the n factors 2 is in the polynomial, so that 2^128 need not be finite. */
OP vec NAME(exponential)(vec x) {
    x = NAME(clamp)(x, -86.6f, 89.0f);
    vec n = NAME(nearest)(NAME(mul)(x, NAME(all)(1.44269504f)));
    vec rest = NAME(fma)(n, NAME(all)(-0.693359375f), x);
    rest = NAME(fma)(n, NAME(all)(2.12194440e-4f), rest); /* ln 2 in two parts, so that n times the first is exact */
    vec sum = NAME(all)(1.0f / 720);
    sum = NAME(fma)(sum, rest, NAME(all)(1.0f / 120));
    sum = NAME(fma)(sum, rest, NAME(all)(1.0f / 24));
    sum = NAME(fma)(sum, rest, NAME(all)(1.0f / 6));
    sum = NAME(fma)(sum, rest, NAME(all)(0.5f));
    sum = NAME(fma)(sum, rest, NAME(all)(1.0f));
    sum = NAME(fma)(sum, rest, NAME(all)(1.0f));
    return NAME(mul)(NAME(add)(sum, sum), NAME(power_of_two)(NAME(sub)(n, NAME(all)(1.0f))));
}

OP vec NAME(kept)(vec value, int rounded) { return rounded ? NAME(round)(value) : value; }

OP vec NAME(gated_silu)(vec gate, vec up, int rounded) {
    vec one = NAME(all)(1.0f), minus = NAME(sub)(NAME(all)(0.0f), gate);
    vec silu = NAME(div)(gate, NAME(add)(one, NAME(exponential)(minus)));
    return NAME(kept)(NAME(mul)(NAME(kept)(silu, rounded), up), rounded);
}

OP void NAME(finish_)(const struct linear *linear, size_t pair, const float *sums, unsigned num_rows, float *out,
                      size_t out_stride, int rounded) {
    size_t column = pair * PAIR;
    vec bias[2] = {NAME(all)(0.0f), NAME(all)(0.0f)};
    if (linear->bias != NULL)
        bias[0] = NAME(load)(linear->bias + column), bias[1] = NAME(load)(linear->bias + column + PANEL);
    for (unsigned row = 0; row < num_rows; row++, sums += PAIR, out += out_stride) {
        vec a = NAME(kept)(NAME(add)(NAME(load)(sums), bias[0]), rounded);
        vec b = NAME(kept)(NAME(add)(NAME(load)(sums + PANEL), bias[1]), rounded);
        if (linear->finish == FINISH_GATED_SILU) {
            NAME(store)(out + column / 2, NAME(gated_silu)(a, b, rounded));
            continue;
        }
        if (linear->finish == FINISH_ADD) {
            a = NAME(kept)(NAME(add)(a, NAME(load)(out + column)), rounded);
            b = NAME(kept)(NAME(add)(b, NAME(load)(out + column + PANEL)), rounded);
        }
        NAME(store)(out + column, a), NAME(store)(out + column + PANEL, b);
    }
}

TARGET static void NAME(finish)(const struct linear *linear, size_t pair, const float *sums, unsigned num_rows,
                                float *out, size_t out_stride, int rounded) {
    if (rounded)
        NAME(finish_)(linear, pair, sums, num_rows, out, out_stride, 1);
    else
        NAME(finish_)(linear, pair, sums, num_rows, out, out_stride, 0);
}

#undef TILE
#undef TIMES
#undef SUM_BFLOAT16
#undef SUM_FLOAT32
#undef CASE
#undef CASES
#undef CASES_4
#undef CASES_5
#undef CASES_6
#undef CASES_12
#undef VECS
