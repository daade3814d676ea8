// SIMD vectors of float32 in GCC's and Clang's vector notation, as wide as the target's registers: one source for every
// processor.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16  // float32 numbers in a vector
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec x) { *(vec *)to = x; }
INLINE vec broadcast(float x) { return x - (vec){0}; }
INLINE vec vec_select(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }
INLINE vec vec_max(vec x, vec y) { return vec_select(x > y, x, y); }

INLINE float reduce_add(vec x) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

INLINE float reduce_max(vec x) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    return x[0];
}

// e^x with an error of at most 2 units in the last place; 0 below -87, and e^88 above 88.
INLINE vec vec_exp(vec x) {
    ivec underflow = x < broadcast(-87.0f), overflow = x > broadcast(88.0f);
    x = vec_select(underflow, broadcast(-87.0f), vec_select(overflow, broadcast(88.0f), x));
    // x = exponent * ln 2 + rest. Adding 1.5 * 2^23 rounds to an integer; ln 2 is subtracted in two parts (Cody, Waite).
    vec exponent = x * 1.44269504088896341f + 12582912.0f - 12582912.0f;
    vec rest = x - exponent * 0.693359375f + exponent * 2.12194440e-4f;
    vec y = broadcast(1.9875691500e-4f);  // the polynomial of Cephes' expf
    y = y * rest + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1.0f;
    vec power = (vec)((__builtin_convertvector(exponent, ivec) + 127) << 23);
    return vec_select(underflow, broadcast(0.0f), y * power);
}

INLINE int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }
