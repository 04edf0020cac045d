/* The operations on one row, for one instruction set, and the table of all its functions; included after
 * linear_kernels.h. Sizes are multiples of 16 unless stated otherwise. */

OP float NAME(total)(vec v) {
    float parts[PANEL];
    NAME(store)(parts, v);
    for (int half = PANEL / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

TARGET static void NAME(norm)(const float *row, const float *weight, float *out, size_t size, size_t true_size,
                              float epsilon, int rounded) {
    vec squares = NAME(all)(0.0f);
    for (size_t i = 0; i < size; i += PANEL) {
        vec value = NAME(load)(row + i);
        squares = NAME(fma)(value, value, squares);
    }
    vec scale = NAME(all)(1.0f / sqrtf(NAME(total)(squares) / (float)true_size + epsilon));
    for (size_t i = 0; i < size; i += PANEL) {
        vec value = NAME(kept)(NAME(mul)(NAME(load)(row + i), scale), rounded);
        NAME(store)(out + i, NAME(kept)(NAME(mul)(NAME(load)(weight + i), value), rounded));
    }
}

TARGET static void NAME(rotate)(float *head, const float *cosine, const float *sine, size_t size, int rounded) {
    size_t half = size / 2;
    for (size_t i = 0; i + PANEL <= half; i += PANEL) {
        vec a = NAME(load)(head + i), b = NAME(load)(head + half + i);
        vec c = NAME(load)(cosine + i), s = NAME(load)(sine + i);
        vec first = NAME(sub)(NAME(kept)(NAME(mul)(a, c), rounded), NAME(kept)(NAME(mul)(b, s), rounded));
        vec second = NAME(add)(NAME(kept)(NAME(mul)(b, c), rounded), NAME(kept)(NAME(mul)(a, s), rounded));
        NAME(store)(head + i, NAME(kept)(first, rounded));
        NAME(store)(head + half + i, NAME(kept)(second, rounded));
    }
    for (size_t i = half / PANEL * PANEL; i < half; i++) {
        float a[4] = {head[i] * cosine[i], head[half + i] * sine[i], head[half + i] * cosine[i], head[i] * sine[i]};
        for (int j = 0; rounded && j < 4; j++) a[j] = round_one(a[j]);
        head[i] = rounded ? round_one(a[0] - a[1]) : a[0] - a[1];
        head[half + i] = rounded ? round_one(a[2] + a[3]) : a[2] + a[3];
    }
}

TARGET static void NAME(add_rows)(float *row, const float *other, size_t size, int rounded) {
    for (size_t i = 0; i < size; i += PANEL)
        NAME(store)(row + i, NAME(kept)(NAME(add)(NAME(load)(row + i), NAME(load)(other + i)), rounded));
}

TARGET static void NAME(narrow)(uint16_t *to, const float *from, size_t size) {
    size_t i = 0;
    for (; i + PANEL <= size; i += PANEL) NAME(store_high)(to + i, NAME(round)(NAME(load)(from + i)));
    for (; i < size; i++) to[i] = narrow_one(from[i]);
}

static const struct linear_kernel NAME(kernel) = {
    FORMAT_FLOAT32, TILE_ROWS, 1, NULL, NULL, NAME(tile), NAME(finish), NAME(norm), NAME(rotate), NAME(add_rows),
    NAME(narrow),
};


#undef ISA
#undef TARGET
#undef ROWS
#undef WIDE_ROWS
#undef PAIR_ROWS
#undef vec
#undef raw
