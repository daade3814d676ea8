// What lies between the products of a decoder's layer in training, forwards and backwards, one pass over memory each.
//
//     rows  tokens    size, n  numbers of a row
//
// Everything is row-major and without gaps. Inputs and outputs of products and their gradients are float32, or bfloat16
// where `narrow`; all else is float32.

#include "vectors.h"

#define FEW 16384  // numbers that one thread goes through sooner than two are woken

INLINE vec get_wide(const float *row, int64_t at, int64_t left) { return get_some(row, at, left, 0); }
INLINE void put_wide(float *row, int64_t at, vec x, int64_t left) { put_some(row, at, x, left, 0); }
INLINE void *row_at(const void *base, int64_t numbers, int narrow) { return (char *)base + numbers * (narrow ? 2 : 4); }

// y = x * rate * weight, rate = 1 / sqrt(mean(x^2) + eps) of each row; known: the rates are given. y may be narrow.
INLINE void norm_of(const int narrow, const float *x, const float *weight, float eps, int64_t rows, int64_t size, void *y,
                    float *rate, int known, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * size;
        void *to = row_at(y, row * size, narrow);
        if (!known) {
            vec sum = every(0.0f);
            for (int64_t i = 0; i < size; i += LANES) sum += get_wide(from, i, size - i) * get_wide(from, i, size - i);
            rate[row] = 1.0f / sqrtf(total(sum) / (float)size + eps);
        }
        for (int64_t i = 0; i < size; i += LANES)
            put_some(to, i, get_wide(from, i, size - i) * rate[row] * get_wide(weight, i, size - i), size - i, narrow);
    }
}

// to_x [rows][size] and to_weight [threads][size], which comes as zeros: the sum of its rows is the gradient. grad may be
// narrow.
INLINE void norm_gradient(const int narrow, const void *grad, const float *x, const float *weight, const float *rate,
                          int64_t rows, int64_t size, float *to_x, float *to_weight, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > FEW)
    for (int thread = 0; thread < threads; thread++) {
        float *sums = to_weight + thread * size;
        for (int64_t row = rows * thread / threads; row < rows * (thread + 1) / threads; row++) {
            const void *g = row_at(grad, row * size, narrow);
            const float *from = x + row * size;
            vec along = every(0.0f);
            for (int64_t i = 0; i < size; i += LANES) {
                vec part = get_some(g, i, size - i, narrow) * get_wide(from, i, size - i) * rate[row];
                along += part * get_wide(weight, i, size - i);
                put_wide(sums, i, get_wide(sums, i, size - i) + part, size - i);
            }
            float mean = total(along) / (float)size;
            for (int64_t i = 0; i < size; i += LANES) {
                vec unit = get_wide(from, i, size - i) * rate[row];
                vec share = get_some(g, i, size - i, narrow) * get_wide(weight, i, size - i) - unit * mean;
                put_wide(to_x + row * size, i, share * rate[row], size - i);
            }
        }
    }
}

// y [rows][n] = silu(gate) * up of x [rows][gate n, up n]; both may be narrow.
INLINE void activation(const int narrow, const void *x, int64_t rows, int64_t n, void *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * n > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const void *from = row_at(x, 2 * row * n, narrow), *from_up = row_at(from, n, narrow);
        void *to = row_at(y, row * n, narrow);
        for (int64_t i = 0; i < n; i += LANES) {
            vec gate = get_some(from, i, n - i, narrow), up = get_some(from_up, i, n - i, narrow);
            put_some(to, i, gate / (1.0f + exponential(-gate)) * up, n - i, narrow);
        }
    }
}

// y again, and the gradient of x from that of y; all may be narrow.
INLINE void activation_gradient(const int narrow, const void *grad, const void *x, int64_t rows, int64_t n, void *y,
                                void *to_x, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * n > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const void *from = row_at(x, 2 * row * n, narrow), *from_up = row_at(from, n, narrow);
        const void *g = row_at(grad, row * n, narrow);
        void *out = row_at(y, row * n, narrow), *to_gate = row_at(to_x, 2 * row * n, narrow);
        void *to_up = row_at(to_gate, n, narrow);
        for (int64_t i = 0; i < n; i += LANES) {
            vec gate = get_some(from, i, n - i, narrow), up = get_some(from_up, i, n - i, narrow);
            vec one = get_some(g, i, n - i, narrow), share = 1.0f / (1.0f + exponential(-gate)), silu = gate * share;
            put_some(out, i, silu * up, n - i, narrow);
            put_some(to_gate, i, one * up * (share + silu * (1.0f - share)), n - i, narrow);
            put_some(to_up, i, one * silu, n - i, narrow);
        }
    }
}

// The first `turned` of `heads` vectors [size] of each row rotated by cos and sin [rows][size], as Decoder.rotary makes
// them, or the gradient of that; the other heads as they are. `to` may be x; both may be narrow.
INLINE void rotation(const int narrow, const void *x, const float *cos, const float *sin, int64_t rows, int64_t turned,
                     int64_t heads, int64_t size, void *to, int backward, int threads) {
    const int64_t half = size / 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * heads * size > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const float *c = cos + row * size, *s = sin + row * size;
        const float *to_low = backward ? s + half : s, *to_high = backward ? s : s + half;
        for (int64_t head = 0; head < turned; head++) {
            const int64_t at = (row * heads + head) * size;
            const void *from = row_at(x, at, narrow), *from_high = row_at(x, at + half, narrow);
            void *out = row_at(to, at, narrow), *out_high = row_at(to, at + half, narrow);
            for (int64_t i = 0; i < half; i += LANES) {
                const int64_t left = half - i;
                vec low = get_some(from, i, left, narrow), high = get_some(from_high, i, left, narrow);
                put_some(out, i, low * get_wide(c, i, left) + high * get_wide(to_low, i, left), left, narrow);
                put_some(out_high, i, high * get_wide(c + half, i, left) + low * get_wide(to_high, i, left), left, narrow);
            }
        }
        if (to != x) {
            const int64_t at = (row * heads + turned) * size;
            memcpy(row_at(to, at, narrow), row_at(x, at, narrow), (size_t)((heads - turned) * size * (narrow ? 2 : 4)));
        }
    }
}

// -- for either width -------------------------------------------------------------------------------------------------

#define EITHER(call, ...) \
    if (narrow) \
        call(1, __VA_ARGS__); \
    else \
        call(0, __VA_ARGS__)

void norm(int narrow, const float *x, const float *weight, float eps, int64_t rows, int64_t size, void *y, float *rate,
          int known, int threads) {
    EITHER(norm_of, x, weight, eps, rows, size, y, rate, known, threads);
}

void norm_backward(int narrow, const void *grad, const float *x, const float *weight, const float *rate, int64_t rows,
                   int64_t size, float *to_x, float *to_weight, int threads) {
    EITHER(norm_gradient, grad, x, weight, rate, rows, size, to_x, to_weight, threads);
}

void activate(int narrow, const void *x, int64_t rows, int64_t n, void *y, int threads) {
    EITHER(activation, x, rows, n, y, threads);
}

void activate_backward(int narrow, const void *grad, const void *x, int64_t rows, int64_t n, void *y, void *to_x,
                       int threads) {
    EITHER(activation_gradient, grad, x, rows, n, y, to_x, threads);
}

void rotate(int narrow, const void *x, const float *cos, const float *sin, int64_t rows, int64_t turned, int64_t heads,
            int64_t size, void *to, int backward, int threads) {
    EITHER(rotation, x, cos, sin, rows, turned, heads, size, to, backward, threads);
}
