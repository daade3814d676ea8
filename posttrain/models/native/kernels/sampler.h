// One token of one request from its logits: the twin of engines/local/sampler.py for requests without top-p and top-k.
#pragma once

#include "vectors.h"

#define VOCAB_BLOCK 64  // entries of the vocabulary that are summed before the running sum

struct sample {
    int64_t token;
    float logp;  // under the distribution that it was drawn from
};

static uint64_t splitmix64(uint64_t x) {  // its finaliser (Steele, Lea, Flood 2014)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// The draw of (seed, counter), uniform in (0, 1].
static float uniform(int64_t seed, int64_t counter) {
    uint64_t x = splitmix64(splitmix64((uint64_t)seed) + (uint64_t)counter * 0x9E3779B97F4A7C15u);
    return ((float)((x >> 40) & 0xFFFFFF) + 0.5f) * 0x1p-24f;
}

// Numbers of scratch that draw_token needs.
INLINE int64_t sampler_scratch(int64_t vocab) {
    const int64_t padded = round_up(vocab, VOCAB_BLOCK);
    return padded + padded / VOCAB_BLOCK;
}

static struct sample greedy_token(const float *logits, int64_t vocab) {
    struct sample best = {0, 0.0f};
    for (int64_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best.token]) best.token = i;
    return best;
}

// By inverting the cumulative distribution, first to a block of the vocabulary, then within it. logits has room for whole
// blocks, and is divided by the temperature.
static struct sample draw_token(float *logits, int64_t vocab, float temperature, float uniform, float *scratch) {
    const int64_t padded = round_up(vocab, VOCAB_BLOCK), blocks = padded / VOCAB_BLOCK;
    float *mass = scratch, *block_mass = mass + padded;
    for (int64_t i = vocab; i < padded; i++) logits[i] = -INFINITY;
    if (temperature != 1.0f) {
        const float divisor = temperature > 1e-6f ? temperature : 1e-6f;
        for (int64_t i = 0; i < vocab; i += LANES) store(logits + i, load(logits + i) / divisor);
    }
    vec most = broadcast(-INFINITY);
    for (int64_t i = 0; i < vocab; i += LANES) most = vec_max(load(logits + i), most);
    const float top = reduce_max(most);
    double total = 0.0;
    for (int64_t b = 0; b < blocks; b++) {
        vec sum = broadcast(0.0f);
        for (int64_t i = b * VOCAB_BLOCK; i < (b + 1) * VOCAB_BLOCK; i += LANES) {
            vec x = vec_exp(load(logits + i) - top);
            store(mass + i, x);
            sum += x;
        }
        block_mass[b] = reduce_add(sum);
        total += block_mass[b];
    }
    // The first block, then the first token, at which the running sum exceeds the draw. By rounding none may: then it is
    // the last one with any mass.
    double left = (double)uniform * total, within = left;
    int64_t block = 0;
    for (int64_t b = 0; b < blocks; b++) {
        if (block_mass[b] > 0.0f) block = b, within = left;
        if (block_mass[b] > left) break;
        left -= block_mass[b];
    }
    int64_t token = block * VOCAB_BLOCK;
    for (int64_t i = block * VOCAB_BLOCK; i < (block + 1) * VOCAB_BLOCK; i++) {
        if (mass[i] > 0.0f) token = i;
        if (mass[i] > within) break;
        within -= mass[i];
    }
    return (struct sample){token, logits[token] - top - (float)log(total)};
}
