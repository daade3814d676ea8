// Rows of float32 or of bf16 (a float32's upper half), read and written as vectors of float32.
#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
#define HAS_BF16 1  // products in bf16, and a cache in bf16 with them
#endif

enum dtype { FLOAT32, BF16 };

INLINE int64_t size_of(enum dtype dtype) { return dtype == BF16 ? 2 : 4; }
INLINE void *element(const void *base, int64_t index, enum dtype dtype) {
    return (char *)base + index * size_of(dtype);
}

INLINE uint16_t bf16_of(float x) {  // to the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

INLINE vec load_typed(const void *row, int64_t at, enum dtype dtype) {
    if (dtype == FLOAT32) return load((const float *)row + at);
    return (vec)(__builtin_convertvector(*(const hvec *)((const uint16_t *)row + at), uvec) << 16);
}

INLINE void store_typed(void *row, int64_t at, vec x, enum dtype dtype) {
    if (dtype == FLOAT32) {
        store((float *)row + at, x);
        return;
    }
    uvec bits = (uvec)x;
    *(hvec *)((uint16_t *)row + at) = __builtin_convertvector((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, hvec);
}

INLINE void store_one(void *row, int64_t at, float x, enum dtype dtype) {
    if (dtype == BF16)
        ((uint16_t *)row)[at] = bf16_of(x);
    else
        ((float *)row)[at] = x;
}

// The first `left` lanes where a row ends within the vector; the others are read as 0 and not written.
INLINE vec load_partial(const void *row, int64_t at, int64_t left, enum dtype dtype) {
    if (left >= LANES) return load_typed(row, at, dtype);
    float x[LANES] = {0};
    memcpy(x, element(row, at, dtype), (size_t)(left * size_of(dtype)));
    return load_typed(x, 0, dtype);
}

INLINE void store_partial(void *row, int64_t at, vec x, int64_t left, enum dtype dtype) {
    if (left >= LANES) {
        store_typed(row, at, x, dtype);
        return;
    }
    float part[LANES];
    store_typed(part, 0, x, dtype);
    memcpy(element(row, at, dtype), part, (size_t)(left * size_of(dtype)));
}
