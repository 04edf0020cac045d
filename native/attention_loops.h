/* Attention's loops for one instruction set; included once for each, after these are defined:
 *
 *     ISA, TARGET             a suffix for names, the function attribute that allows the instructions
 *     vec, LANES              a vector of floats, how many it has
 *     SIDE                    how many vectors of keys `score` transposes at once
 *     WIDE                    how many vectors of columns `product` keeps in registers for each of six rows
 *     LOAD STORE SET FMA MAX SUM LARGEST
 *     WIDEN                   LANES bf16 numbers in memory as floats
 *     LOW_HALVES HIGH_HALVES  of each 32-bit word the first and the second bf16 number as floats
 *     TRANSPOSE               out[4] = word 0..3 of the four words that LANES keys have at base + offsets[key]
 *     TIMES_POWER(v, n, shifted)  v * 2^n; `shifted` has the integer n in the low bits of a float's
 *     ZERO_BELOW(v, x, least) v, 0 where x < least
 */

/* exp(x) for x <= 20; 0 below -86.6; exp(0) is 1. Relative error: 2e-7 + 3e-8 |x|. NaN stays NaN: MAX returns its
 * second argument if either is NaN. */
TARGET INLINE vec NAME(exp)(vec x) {
    const vec magic = SET(12582912.0f), least = SET(-86.6f); /* 1.5 * 2^23: rounds to an integer when added */
    const vec log2_e = SET(1.44269504f);
    vec bounded = MAX(least, x);
    vec shifted = FMA(bounded, log2_e, magic), n = shifted - magic;
    vec rest = FMA(bounded, log2_e, -n);                               /* at most 1/2 */
    vec sum = FMA(rest, SET(1.54035304e-4f), SET(1.33335581e-3f)); /* 2^rest by its power series: (ln 2)^k / k! */
    sum = FMA(sum, rest, SET(9.61812911e-3f));
    sum = FMA(sum, rest, SET(5.55041087e-2f));
    sum = FMA(sum, rest, SET(0.240226507f));
    sum = FMA(sum, rest, SET(0.693147181f));
    sum = FMA(sum, rest, SET(1.0f));
    return ZERO_BELOW(TIMES_POWER(sum, n, shifted), x, least);
}

TARGET INLINE float NAME(exp_one)(float x) {
    float lanes[LANES];
    STORE(lanes, NAME(exp)(SET(x)));
    return lanes[0];
}

/* cap * tanh(x / cap) */
TARGET INLINE vec NAME(cap)(vec x, float cap) {
    vec twice = x * SET(2.0f / cap), bound = SET(20.0f);
    twice = MAX(-bound, twice);
    twice = -MAX(-bound, -twice);
    vec power = NAME(exp)(twice), one = SET(1.0f);
    return SET(cap) * ((power - one) / (power + one));
}

TARGET static void NAME(pack_keys)(float *to, struct pool_rows rows, int dim, int dtype, struct ahead *ahead) {
    const int halves = dtype == ATTENTION_BF16, words = halves ? dim / 2 : dim;
    for (int key = 0; key < rows.count; key += LANES) {
        for (int word = 0; word < words; word += 4) {
            const char *at = rows.base + 4 * word;
            fetch_row(ahead);
            vec out[4];
            TRANSPOSE(out, at, rows.offsets + key)
            float *row = to + (halves ? 2 : 1) * word * TILE + key;
            for (int i = 0; i < 4; i++) {
                if (halves) {
                    STORE(row + 2 * i * TILE, LOW_HALVES(out[i]));
                    STORE(row + (2 * i + 1) * TILE, HIGH_HALVES(out[i]));
                } else {
                    STORE(row + i * TILE, out[i]);
                }
            }
        }
    }
}

/* Callers pass constant `rows` and `halves`, so that transposed keys are used while they are in registers. */
TARGET INLINE void NAME(score_block)(float *scores, const float *query, const struct pool_rows keys, int dim,
                                     const int rows, const int halves, struct ahead *ahead) {
    for (int key = 0; key < keys.count; key += SIDE * LANES) {
        vec sums[6][SIDE];
        for (int r = 0; r < rows; r++)
            for (int s = 0; s < SIDE; s++) sums[r][s] = SET(0.0f);
        for (int k = 0; k < dim; k += halves ? 8 : 4) {
            const char *at = keys.base + (halves ? 2 : 4) * k;
            vec out[SIDE][4];
            for (int s = 0; s < SIDE; s++) {
                fetch_row(ahead);
                if (s == 0) fetch_row(ahead);
                TRANSPOSE(out[s], at, keys.offsets + key + s * LANES)
            }
            for (int i = 0; i < (halves ? 8 : 4); i++) {
                vec column[SIDE];
                for (int s = 0; s < SIDE; s++)
                    column[s] = !halves ? out[s][i] : i % 2 ? HIGH_HALVES(out[s][i / 2]) : LOW_HALVES(out[s][i / 2]);
                for (int r = 0; r < rows; r++)
                    for (int s = 0; s < SIDE; s++) sums[r][s] = FMA(SET(query[r * dim + k + i]), column[s], sums[r][s]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int s = 0; s < SIDE; s++) STORE(scores + r * TILE + key + s * LANES, sums[r][s]);
    }
}

TARGET INLINE void NAME(score_rows)(float *scores, const float *query, const struct pool_rows keys, int dim, int rows,
                                    const int halves, struct ahead *ahead) {
    switch (rows) {
        case 1: NAME(score_block)(scores, query, keys, dim, 1, halves, ahead); break;
        case 2: NAME(score_block)(scores, query, keys, dim, 2, halves, ahead); break;
        case 3: NAME(score_block)(scores, query, keys, dim, 3, halves, ahead); break;
        case 4: NAME(score_block)(scores, query, keys, dim, 4, halves, ahead); break;
        case 5: NAME(score_block)(scores, query, keys, dim, 5, halves, ahead); break;
        case 6: NAME(score_block)(scores, query, keys, dim, 6, halves, ahead); break;
    }
}

TARGET static void NAME(score)(float *scores, const float *query, struct pool_rows keys, int dim, int dtype, int rows,
                               struct ahead *ahead) {
    if (dtype == ATTENTION_BF16)
        NAME(score_rows)(scores, query, keys, dim, rows, 1, ahead);
    else
        NAME(score_rows)(scores, query, keys, dim, rows, 0, ahead);
}

TARGET static void NAME(expand_values)(float *to, struct pool_rows rows, int dim, int padded, int dtype) {
    const int whole = dim / LANES * LANES;
    for (int key = 0; key < rows.count; key++, to += padded) {
        const float *floats = (const float *)(rows.base + rows.offsets[key]);
        const uint16_t *halves = (const uint16_t *)floats;
        for (int i = 0; i < whole; i += LANES)
            STORE(to + i, dtype == ATTENTION_BF16 ? WIDEN(halves + i) : LOAD(floats + i));
        for (int i = whole; i < dim; i++) to[i] = dtype == ATTENTION_BF16 ? widen_bf16(halves[i]) : floats[i];
        for (int i = dim; i < padded; i++) to[i] = 0.0f;
    }
}

/* The right factor of a product. */
struct NAME(right) {
    const char *base;
    const int64_t *offsets; /* of each row, in bytes; NULL: `stride` bytes apart */
    int64_t stride;
};

/* Callers pass constant `rows`, `width` and `kind`, so that all sums stay in registers. */
TARGET INLINE void NAME(block)(float *c, int c_stride, const float *a, int a_stride, const struct NAME(right) b,
                               const int rows, const int width, const enum right_kind kind, int depth, int add,
                               struct ahead *ahead) {
    vec sums[6][WIDE];
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < width; w++) sums[r][w] = add ? LOAD(c + r * c_stride + w * LANES) : SET(0.0f);
    for (int k = 0; k < depth; k++) {
        const char *at = b.base + (kind == RIGHT_MATRIX ? k * b.stride : b.offsets[k]);
        if (kind != RIGHT_MATRIX || k % 2 == 0) fetch_row(ahead);
        vec column[WIDE];
        for (int w = 0; w < width; w++)
            column[w] =
                kind == RIGHT_BF16 ? WIDEN((const uint16_t *)at + w * LANES) : LOAD((const float *)at + w * LANES);
        for (int r = 0; r < rows; r++) {
            const float scalar = a[r * a_stride + k];
            for (int w = 0; w < width; w++) sums[r][w] = FMA(SET(scalar), column[w], sums[r][w]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < width; w++) STORE(c + r * c_stride + w * LANES, sums[r][w]);
}

TARGET INLINE void NAME(panel)(float *c, int c_stride, const float *a, int a_stride, const struct NAME(right) b,
                               int rows, const int width, const enum right_kind kind, int depth, int add,
                               struct ahead *ahead) {
    for (; rows > 6; rows -= 6, a += 6 * a_stride, c += 6 * c_stride)
        NAME(block)(c, c_stride, a, a_stride, b, 6, width, kind, depth, add, ahead);
    switch (rows) {
        case 1: NAME(block)(c, c_stride, a, a_stride, b, 1, width, kind, depth, add, ahead); break;
        case 2: NAME(block)(c, c_stride, a, a_stride, b, 2, width, kind, depth, add, ahead); break;
        case 3: NAME(block)(c, c_stride, a, a_stride, b, 3, width, kind, depth, add, ahead); break;
        case 4: NAME(block)(c, c_stride, a, a_stride, b, 4, width, kind, depth, add, ahead); break;
        case 5: NAME(block)(c, c_stride, a, a_stride, b, 5, width, kind, depth, add, ahead); break;
        case 6: NAME(block)(c, c_stride, a, a_stride, b, 6, width, kind, depth, add, ahead); break;
    }
}

TARGET INLINE void NAME(multiply)(float *c, int c_stride, const float *a, int a_stride, struct NAME(right) b, int rows,
                                  int columns, const enum right_kind kind, int depth, int add, struct ahead *ahead) {
    const int64_t bytes = LANES * (kind == RIGHT_BF16 ? 2 : 4);
    for (; columns >= WIDE * LANES; columns -= WIDE * LANES, b.base += WIDE * bytes, c += WIDE * LANES)
        NAME(panel)(c, c_stride, a, a_stride, b, rows, WIDE, kind, depth, add, ahead);
    for (; columns > 0; columns -= LANES, b.base += bytes, c += LANES)
        NAME(panel)(c, c_stride, a, a_stride, b, rows, 1, kind, depth, add, ahead);
}

TARGET static void NAME(product)(float *c, int c_stride, const float *a, int a_stride, const float *b, int b_stride,
                                 int rows, int columns, int depth, int add, struct ahead *ahead) {
    const struct NAME(right) right = {(const char *)b, NULL, (int64_t)b_stride * 4};
    NAME(multiply)(c, c_stride, a, a_stride, right, rows, columns, RIGHT_MATRIX, depth, add, ahead);
}

TARGET static void NAME(product_in_place)(float *c, int c_stride, const float *a, int a_stride, struct pool_rows b,
                                          int dtype, int rows, int dim, int add, struct ahead *ahead) {
    const struct NAME(right) right = {b.base, b.offsets, 0};
    if (dtype == ATTENTION_BF16)
        NAME(multiply)(c, c_stride, a, a_stride, right, rows, dim, RIGHT_BF16, b.count, add, ahead);
    else
        NAME(multiply)(c, c_stride, a, a_stride, right, rows, dim, RIGHT_F32, b.count, add, ahead);
}

TARGET INLINE void NAME(scale_row)(float *row, int length, float factor) {
    for (int i = 0; i < length; i += LANES) STORE(row + i, LOAD(row + i) * SET(factor));
}

/* Set scores the row does not see to -inf; return the largest score, -inf if it sees none. In a row with NaN it may be
 * any score: the weights and their sum are NaN in any case. */
TARGET INLINE float NAME(largest_seen)(float *scores, int low, int high, float softcap) {
    if (softcap > 0.0f)
        for (int i = 0; i < TILE; i += LANES) STORE(scores + i, NAME(cap)(LOAD(scores + i), softcap));
    for (int i = 0; i < low; i++) scores[i] = -INFINITY;
    for (int i = high < 0 ? 0 : high; i < TILE; i++) scores[i] = -INFINITY;
    vec largest = LOAD(scores);
    for (int i = LANES; i < TILE; i += LANES) largest = MAX(largest, LOAD(scores + i));
    return LARGEST(largest);
}

TARGET static void NAME(soften)(float *scores, const struct softmax *state, struct sight sight, int rows, int padded,
                                float softcap, int first, struct ahead *ahead) {
    for (int r = 0; r < rows; r++, scores += TILE) {
        for (int i = 0; i < FETCHED_A_ROW && fetch_row(ahead); i++) continue;
        float largest = NAME(largest_seen)(scores, sight.low[r], sight.high[r], softcap);
        float before = first ? -INFINITY : state->max[r];
        if (before > largest) largest = before;
        const float base = largest == -INFINITY ? 0.0f : largest;
        vec sums = SET(0.0f);
        for (int i = 0; i < TILE; i += LANES) {
            vec weight = NAME(exp)(LOAD(scores + i) - SET(base));
            STORE(scores + i, weight);
            sums = sums + weight;
        }
        float sum = SUM(sums), factor = 1.0f;
        if (!first && before != largest) factor = NAME(exp_one)(before - largest);
        state->max[r] = largest;
        state->sum[r] = first ? sum : state->sum[r] * factor + sum;
        if (factor != 1.0f) NAME(scale_row)(state->output + r * padded, padded, factor);
    }
}

TARGET static void NAME(merge)(const struct softmax *state, const struct softmax *part, int rows, int padded) {
    for (int r = 0; r < rows; r++) {
        float ours = state->max[r], theirs = part->max[r];
        if (theirs == -INFINITY && part->sum[r] == 0.0f) continue; /* a NaN sum must not be skipped */
        float largest = theirs > ours ? theirs : ours;
        float keep = NAME(exp_one)(ours - largest), take = NAME(exp_one)(theirs - largest);
        float *output = state->output + r * padded;
        const float *more = part->output + r * padded;
        state->max[r] = largest, state->sum[r] = state->sum[r] * keep + part->sum[r] * take;
        for (int i = 0; i < padded; i += LANES)
            STORE(output + i, FMA(LOAD(more + i), SET(take), LOAD(output + i) * SET(keep)));
    }
}

TARGET static void NAME(finish)(void *to, int dtype, const struct softmax *state, int row, int dim, int padded,
                                const float *sink) {
    float sum = state->sum[row], factor = 1.0f, *output = state->output + row * padded;
    if (sink != NULL) {
        float largest = *sink > state->max[row] ? *sink : state->max[row];
        factor = NAME(exp_one)(state->max[row] - largest);
        sum = sum * factor + NAME(exp_one)(*sink - largest);
    }
    NAME(scale_row)(output, padded, factor / sum);
    if (dtype == ATTENTION_BF16)
        for (int i = 0; i < dim; i++) ((uint16_t *)to)[i] = round_to_bf16(output[i]);
    else
        memcpy(to, output, dim * sizeof *output);
}

TARGET static void NAME(load_query)(float *to, const void *from, int dtype, int dim, float scale) {
    for (int i = 0; i < dim; i++)
        to[i] = scale * (dtype == ATTENTION_BF16 ? widen_bf16(((const uint16_t *)from)[i]) : ((const float *)from)[i]);
}

static const struct attention_kernel NAME(kernel) = {
    LANES, SIDE * LANES, NAME(score), NAME(pack_keys), NAME(expand_values), NAME(product), NAME(product_in_place),
    NAME(soften), NAME(merge),     NAME(finish),        NAME(load_query),
};

#undef ISA
#undef TARGET
#undef vec
#undef LANES
#undef WIDE
#undef SIDE
#undef LOAD
#undef STORE
#undef SET
#undef WIDEN
#undef FMA
#undef MAX
#undef TIMES_POWER
#undef ZERO_BELOW
#undef SUM
#undef LARGEST
#undef LOW_HALVES
#undef HIGH_HALVES
#undef TRANSPOSE
