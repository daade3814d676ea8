// What a decoder does to a row between its matrix products: RMS norm, rotary embedding, SwiGLU.
#pragma once

#include "dtype.h"

// 1 / sqrt(mean(x^2) + eps) (arXiv 1910.07467).
INLINE float rms_rate(const float *x, int64_t size, float eps) {
    vec sum = broadcast(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        vec part = load_partial(x, i, size - i, FLOAT32);
        sum += part * part;
    }
    return 1.0f / sqrtf(reduce_add(sum) / (float)size + eps);
}

// out = x * rate * weight; out may be x.
INLINE void rms_scale(const float *x, float rate, const float *weight, int64_t size, void *out, enum dtype dtype) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        vec unit = load_partial(x, i, left, FLOAT32) * rate;
        store_partial(out, i, unit * load_partial(weight, i, left, FLOAT32), left, dtype);
    }
}

// A head [size] rotated (RoPE, arXiv 2104.09864): x * cos + roll(x, size / 2) * (sin_low, sin_high); out may be x.
// Forwards sin_low is the first half of Decoder.rotary's sines, which holds the sign; backwards the halves change places.
INLINE void rope(const void *x, const float *cos, const float *sin_low, const float *sin_high, int64_t size, void *out,
                 enum dtype dtype) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i;
        vec low = load_partial(x, i, left, dtype), high = load_partial(x, half + i, left, dtype);
        vec cos_low = load_partial(cos, i, left, FLOAT32), cos_high = load_partial(cos, half + i, left, FLOAT32);
        store_partial(out, i, low * cos_low + high * load_partial(sin_low, i, left, FLOAT32), left, dtype);
        store_partial(out, half + i, high * cos_high + low * load_partial(sin_high, i, left, FLOAT32), left, dtype);
    }
}

// silu(gate) * up (arXiv 2002.05202).
INLINE vec swiglu(vec gate, vec up) { return gate / (1.0f + vec_exp(-gate)) * up; }
