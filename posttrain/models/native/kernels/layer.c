// What lies between the matrix products of a decoder's layer in training, forwards and backwards, in one pass over memory
// each.
//
//     rows  tokens    size  numbers of a row
//
// Everything is row-major without gaps. Inputs and outputs of products and their gradients are of `dtype`, everything else
// is float32.

#include "row_ops.h"

#define PARALLEL_SIZE 16384  // numbers that one thread goes through in less time than it takes to wake another

INLINE vec load_f32(const float *row, int64_t at, int64_t left) { return load_partial(row, at, left, FLOAT32); }
INLINE void store_f32(float *row, int64_t at, vec x, int64_t left) { store_partial(row, at, x, left, FLOAT32); }

// out = x * rate * weight. rate [rows] of each row is computed, unless it is known.
INLINE void norm_rows(const enum dtype dtype, const float *x, const float *weight, float eps, int64_t rows, int64_t size,
                      void *out, float *rate, int known, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > PARALLEL_SIZE)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * size;
        if (!known) rate[row] = rms_rate(from, size, eps);
        rms_scale(from, rate[row], weight, size, element(out, row * size, dtype), dtype);
    }
}

// grad_x [rows][size] and grad_weight [threads][size], which comes as zeros: the sum of its rows is the gradient.
INLINE void norm_rows_backward(const enum dtype dtype, const void *grad, const float *x, const float *weight,
                               const float *rate, int64_t rows, int64_t size, float *grad_x, float *grad_weight,
                               int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > PARALLEL_SIZE)
    for (int thread = 0; thread < threads; thread++) {
        float *sums = grad_weight + thread * size;
        for (int64_t row = rows * thread / threads; row < rows * (thread + 1) / threads; row++) {
            const void *g = element(grad, row * size, dtype);
            const float *from = x + row * size;
            vec product = broadcast(0.0f);
            for (int64_t i = 0; i < size; i += LANES) {
                const int64_t left = size - i;
                vec part = load_partial(g, i, left, dtype) * load_f32(from, i, left) * rate[row];
                product += part * load_f32(weight, i, left);
                store_f32(sums, i, load_f32(sums, i, left) + part, left);
            }
            const float mean = reduce_add(product) / (float)size;
            for (int64_t i = 0; i < size; i += LANES) {
                const int64_t left = size - i;
                vec unit = load_f32(from, i, left) * rate[row];
                vec to_unit = load_partial(g, i, left, dtype) * load_f32(weight, i, left) - unit * mean;
                store_f32(grad_x + row * size, i, to_unit * rate[row], left);
            }
        }
    }
}

// out [rows][size] = silu(gate) * up of x [rows][gate size, up size].
INLINE void swiglu_rows(const enum dtype dtype, const void *x, int64_t rows, int64_t size, void *out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > PARALLEL_SIZE)
    for (int64_t row = 0; row < rows; row++) {
        const void *gates = element(x, 2 * row * size, dtype), *ups = element(gates, size, dtype);
        void *to = element(out, row * size, dtype);
        for (int64_t i = 0; i < size; i += LANES) {
            const int64_t left = size - i;
            vec gate = load_partial(gates, i, left, dtype), up = load_partial(ups, i, left, dtype);
            store_partial(to, i, swiglu(gate, up), left, dtype);
        }
    }
}

// out once more, and the gradient of x from that of out.
INLINE void swiglu_rows_backward(const enum dtype dtype, const void *grad, const void *x, int64_t rows, int64_t size,
                                 void *out, void *grad_x, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > PARALLEL_SIZE)
    for (int64_t row = 0; row < rows; row++) {
        const void *gates = element(x, 2 * row * size, dtype), *ups = element(gates, size, dtype);
        const void *g = element(grad, row * size, dtype);
        void *to = element(out, row * size, dtype), *grad_gate = element(grad_x, 2 * row * size, dtype);
        void *grad_up = element(grad_gate, size, dtype);
        for (int64_t i = 0; i < size; i += LANES) {
            const int64_t left = size - i;
            vec gate = load_partial(gates, i, left, dtype), up = load_partial(ups, i, left, dtype);
            vec grads = load_partial(g, i, left, dtype);
            vec sigmoid = 1.0f / (1.0f + vec_exp(-gate)), silu = gate * sigmoid;
            store_partial(to, i, silu * up, left, dtype);
            store_partial(grad_gate, i, grads * up * (sigmoid + silu * (1.0f - sigmoid)), left, dtype);
            store_partial(grad_up, i, grads * silu, left, dtype);
        }
    }
}

// The first `rotated` of `heads` heads [size] of each row rotated by cos and sin [rows][size], as Decoder.rotary makes
// them, or the gradient of that; the other heads as they are. out may be x.
INLINE void rope_rows(const enum dtype dtype, const void *x, const float *cos, const float *sin, int64_t rows,
                      int64_t rotated, int64_t heads, int64_t size, void *out, int backward, int threads) {
    const int64_t half = size / 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * heads * size > PARALLEL_SIZE)
    for (int64_t row = 0; row < rows; row++) {
        const float *row_sin = sin + row * size;
        const float *sin_low = backward ? row_sin + half : row_sin, *sin_high = backward ? row_sin : row_sin + half;
        for (int64_t head = 0; head < rotated; head++) {
            const int64_t at = (row * heads + head) * size;
            rope(element(x, at, dtype), cos + row * size, sin_low, sin_high, size, element(out, at, dtype), dtype);
        }
        if (out != x) {
            const int64_t at = (row * heads + rotated) * size, bytes = (heads - rotated) * size * size_of(dtype);
            memcpy(element(out, at, dtype), element(x, at, dtype), (size_t)bytes);
        }
    }
}

// -- for either type --------------------------------------------------------------------------------------------------

#define EITHER(function, ...) \
    if (dtype == BF16) \
        function(BF16, __VA_ARGS__); \
    else \
        function(FLOAT32, __VA_ARGS__)

void rms_norm(int dtype, const float *x, const float *weight, float eps, int64_t rows, int64_t size, void *out,
              float *rate, int known, int threads) {
    EITHER(norm_rows, x, weight, eps, rows, size, out, rate, known, threads);
}

void rms_norm_backward(int dtype, const void *grad, const float *x, const float *weight, const float *rate, int64_t rows,
                       int64_t size, float *grad_x, float *grad_weight, int threads) {
    EITHER(norm_rows_backward, grad, x, weight, rate, rows, size, grad_x, grad_weight, threads);
}

void swiglu_forward(int dtype, const void *x, int64_t rows, int64_t size, void *out, int threads) {
    EITHER(swiglu_rows, x, rows, size, out, threads);
}

void swiglu_backward(int dtype, const void *grad, const void *x, int64_t rows, int64_t size, void *out, void *grad_x,
                     int threads) {
    EITHER(swiglu_rows_backward, grad, x, rows, size, out, grad_x, threads);
}

void rope_forward(int dtype, const void *x, const float *cos, const float *sin, int64_t rows, int64_t rotated,
                  int64_t heads, int64_t size, void *out, int threads) {
    EITHER(rope_rows, x, cos, sin, rows, rotated, heads, size, out, 0, threads);
}

void rope_backward(int dtype, const void *grad, const float *cos, const float *sin, int64_t rows, int64_t rotated,
                   int64_t heads, int64_t size, void *grad_x, int threads) {
    EITHER(rope_rows, grad, cos, sin, rows, rotated, heads, size, grad_x, 1, threads);
}
