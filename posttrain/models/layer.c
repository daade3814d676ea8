// What lies between the products of a decoder's layer in training, forwards and backwards, one pass over memory each.
//
//     rows  tokens    size, n  numbers of a row
//
// Everything is float32, row-major and without gaps.

#include "vectors.h"

#define FEW 16384  // numbers that one thread goes through sooner than two are woken

INLINE vec some(const float *at, int64_t count) {
    if (count >= LANES) return load(at);
    vec x = {0};
    memcpy(&x, at, sizeof(float) * (size_t)count);
    return x;
}

INLINE void put_some(float *at, vec x, int64_t count) {
    if (count >= LANES)
        store(at, x);
    else
        memcpy(at, &x, sizeof(float) * (size_t)count);
}

// y = x * rate * weight, rate = 1 / sqrt(mean(x^2) + eps) of each row; known: the rates are given.
void norm(const float *x, const float *weight, float eps, int64_t rows, int64_t size, float *y, float *rate, int known,
          int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * size;
        if (!known) {
            vec sum = every(0.0f);
            for (int64_t i = 0; i < size; i += LANES) sum += some(from + i, size - i) * some(from + i, size - i);
            rate[row] = 1.0f / sqrtf(total(sum) / (float)size + eps);
        }
        for (int64_t i = 0; i < size; i += LANES)
            put_some(y + row * size + i, some(from + i, size - i) * rate[row] * some(weight + i, size - i), size - i);
    }
}

// to_x [rows][size] and to_weight [threads][size], which comes as zeros: the sum of its rows is the gradient.
void norm_backward(const float *grad, const float *x, const float *weight, const float *rate, int64_t rows, int64_t size,
                   float *to_x, float *to_weight, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > FEW)
    for (int thread = 0; thread < threads; thread++) {
        float *sums = to_weight + thread * size;
        for (int64_t row = rows * thread / threads; row < rows * (thread + 1) / threads; row++) {
            const float *g = grad + row * size, *from = x + row * size;
            vec along = every(0.0f);
            for (int64_t i = 0; i < size; i += LANES) {
                vec unit = some(from + i, size - i) * rate[row], part = some(g + i, size - i) * unit;
                along += part * some(weight + i, size - i);
                put_some(sums + i, some(sums + i, size - i) + part, size - i);
            }
            float mean = total(along) / (float)size;
            for (int64_t i = 0; i < size; i += LANES) {
                vec unit = some(from + i, size - i) * rate[row];
                vec x_share = some(g + i, size - i) * some(weight + i, size - i) - unit * mean;
                put_some(to_x + row * size + i, x_share * rate[row], size - i);
            }
        }
    }
}

// y [rows][n] = silu(gate) * up of x [rows][gate n, up n]
void activate(const float *x, int64_t rows, int64_t n, float *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * n > FEW)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < n; i += LANES) {
            vec gate = some(x + 2 * row * n + i, n - i), up = some(x + 2 * row * n + n + i, n - i);
            put_some(y + row * n + i, gate / (1.0f + exponential(-gate)) * up, n - i);
        }
}

// y again, and the gradient of x from that of y.
void activate_backward(const float *grad, const float *x, int64_t rows, int64_t n, float *y, float *to_x, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * n > FEW)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < n; i += LANES) {
            vec gate = some(x + 2 * row * n + i, n - i), up = some(x + 2 * row * n + n + i, n - i);
            vec g = some(grad + row * n + i, n - i), share = 1.0f / (1.0f + exponential(-gate)), silu = gate * share;
            put_some(y + row * n + i, silu * up, n - i);
            put_some(to_x + 2 * row * n + i, g * up * (share + silu * (1.0f - share)), n - i);
            put_some(to_x + 2 * row * n + n + i, g * silu, n - i);
        }
}

// The first `turned` of `heads` vectors [size] of each row rotated by cos and sin [rows][size], as Decoder.rotary makes
// them, or the gradient of that; the other heads as they are. `to` may be x.
void rotate(const float *x, const float *cos, const float *sin, int64_t rows, int64_t turned, int64_t heads, int64_t size,
            float *to, int backward, int threads) {
    const int64_t half = size / 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * heads * size > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const float *c = cos + row * size, *s = sin + row * size;
        const float *to_low = backward ? s + half : s, *to_high = backward ? s : s + half;
        for (int64_t head = 0; head < turned; head++) {
            const float *from = x + (row * heads + head) * size;
            float *out = to + (row * heads + head) * size;
            for (int64_t i = 0; i < half; i += LANES) {
                vec low = some(from + i, half - i), high = some(from + half + i, half - i);
                put_some(out + i, low * some(c + i, half - i) + high * some(to_low + i, half - i), half - i);
                put_some(out + half + i, high * some(c + half + i, half - i) + low * some(to_high + i, half - i), half - i);
            }
        }
        if (to != x)
            memcpy(to + (row * heads + turned) * size, x + (row * heads + turned) * size,
                   sizeof(float) * (size_t)((heads - turned) * size));
    }
}
