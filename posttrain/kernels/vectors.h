// Vectors of float32 as wide as the processor's registers, in GCC's and Clang's notation; for any processor.

#include <math.h>
#include <stdint.h>
#include <string.h>

// Numbers in a register.
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits_t __attribute__((vector_size(4 * LANES)));
typedef uint16_t half_t __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vec load(const float *at) { return *(const vec *)at; }
INLINE void store(float *at, vec x) { *(vec *)at = x; }
INLINE vec every(float x) { return x - (vec){0}; }
INLINE vec choose(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }
INLINE vec greater(vec x, vec y) { return choose(x > y, x, y); }

INLINE float total(vec x) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

INLINE float greatest(vec x) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    return x[0];
}

// e^x to within 2 units in the last place; 0 below -87, and e^88 above 88.
INLINE vec exponential(vec x) {
    ivec none = x < every(-87.0f), beyond = x > every(88.0f);
    x = choose(none, every(-87.0f), choose(beyond, every(88.0f), x));
    vec turns = x * 1.44269504088896341f + 12582912.0f - 12582912.0f;  // rounded: its fraction falls off 2^23 and a half
    vec rest = x - turns * 0.693359375f + turns * 2.12194440e-4f;
    vec y = every(1.9875691500e-4f);
    y = y * rest + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1.0f;
    vec scale = (vec)((__builtin_convertvector(turns, ivec) + 127) << 23);
    return choose(none, every(0.0f), y * scale);
}

// -- numbers of two widths: float32, or bfloat16 where `narrow` -------------------------------------------------------

INLINE uint16_t rounded(float x) {  // to bfloat16, the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

INLINE vec get(const void *row, int64_t at, int narrow) {
    if (!narrow) return load((const float *)row + at);
    return (vec)(__builtin_convertvector(*(const half_t *)((const uint16_t *)row + at), bits_t) << 16);
}

INLINE void put(void *row, int64_t at, vec x, int narrow) {
    if (!narrow) {
        store((float *)row + at, x);
        return;
    }
    bits_t bits = (bits_t)x;
    *(half_t *)((uint16_t *)row + at) = __builtin_convertvector((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, half_t);
}

// The same of fewer numbers than a vector has, where fewer are left.
INLINE vec get_some(const void *row, int64_t at, int64_t left, int narrow) {
    if (left >= LANES) return get(row, at, narrow);
    float x[LANES] = {0};
    if (narrow)
        memcpy(x, (const uint16_t *)row + at, sizeof(uint16_t) * (size_t)left);
    else
        memcpy(x, (const float *)row + at, sizeof(float) * (size_t)left);
    return get(x, 0, narrow);
}

INLINE void put_some(void *row, int64_t at, vec x, int64_t left, int narrow) {
    if (left >= LANES) {
        put(row, at, x, narrow);
        return;
    }
    float part[LANES];
    put(part, 0, x, narrow);
    if (narrow)
        memcpy((uint16_t *)row + at, part, sizeof(uint16_t) * (size_t)left);
    else
        memcpy((float *)row + at, part, sizeof(float) * (size_t)left);
}

// -- products ---------------------------------------------------------------------------------------------------------

#define PANEL (2 * LANES)  // outputs that are computed together
#if LANES == 16
#define ROWS 12  // most rows of them: 24 sums, 2 vectors of b and a factor fill 32 registers
#define EVERY_HEIGHT(CASE) \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#else
#define ROWS 6
#define EVERY_HEIGHT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif

// sum[rows][PANEL] += over `depth` of a[row, i] b[i][PANEL]; entries of a lie anywhere. Each is added up by itself, in the
// order of i.
INLINE void add_up(const int rows, vec sum[ROWS][2], int64_t depth, const float *a, int64_t a_row, int64_t a_next,
                   const float *b, int64_t b_next) {
    for (int64_t i = 0; i < depth; i++) {
        vec one = load(b + i * b_next), other = load(b + i * b_next + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            float x = a[r * a_row + i * a_next];
            sum[r][0] += one * x;
            sum[r][1] += other * x;
        }
    }
}
