// Attention of a decoding step: the queries of one request and key head to what lies in the KV cache.
//
//     S  head size    D  the same, padded to whole vectors
//
// The cache is in pages of PAGE tokens. In a page, a key head of a layer has keys in blocks of a vector of tokens
// [PAGE / LANES][D][LANES], and values [PAGE][D].
#pragma once

#include "gemm.h"

#define QUERIES (LANES == 16 ? 4 : 2)  // that go through the cache together: registers hold QUERIES x VECTORS sums
#define VECTORS 4                      // of tokens or of a value's numbers, for each of these queries
#define PAGE 64                        // tokens; whole blocks of VECTORS vectors

INLINE int64_t pages_of(int64_t tokens) { return (tokens + PAGE - 1) / PAGE; }

struct visible {  // to a request: its prompt, which others may share, and its own tokens
    void *const *pages[2];
    int64_t tokens[2];
    int64_t keys, values;  // where those of the layer and head begin in each page
};

// out [queries][D] = softmax attention of query [queries][D]. scores [queries][stride] has room for the visible tokens of
// each part rounded up to whole pages. No sum depends on where a page begins.
INLINE void attend(const enum dtype dtype, const int queries, int64_t size, int64_t padded, const float *query,
                   const struct visible *visible, float *scores, int64_t stride, float *out) {
    const int64_t start[2] = {0, round_up(visible->tokens[0], LANES)};
#define SCORES(vectors) \
    tile_multiply(dtype, queries, vectors, size, query, padded, 1, \
                  element(visible->pages[part][t / PAGE], visible->keys + t % PAGE * padded, dtype), LANES * padded, LANES, \
                  scores + start[part] + t, stride, 0)
    for (int part = 0; part < 2; part++) {
        int64_t t = 0, left = visible->tokens[part];
        for (; left > VECTORS / 2 * LANES; t += VECTORS * LANES, left -= VECTORS * LANES) SCORES(VECTORS);
        if (left > LANES)
            SCORES(VECTORS / 2);
        else if (left > 0)
            SCORES(1);
        // the next part's scores are written over those of tokens beyond this one's
    }
#undef SCORES
    float share[QUERIES];
    for (int q = 0; q < queries; q++) {
        float *row = scores + q * stride;
        vec most = broadcast(-INFINITY), sum = broadcast(0.0f);
        for (int part = 0; part < 2; part++) {
            const int64_t end = start[part] + visible->tokens[part], whole = start[part] + round_up(visible->tokens[part], LANES);
            for (int64_t t = end; t < whole; t++) row[t] = -INFINITY;  // there the cache holds nothing, or an older request's
            for (int64_t t = start[part]; t < whole; t += LANES) most = vec_max(load(row + t), most);
        }
        const float top = reduce_max(most);
        for (int part = 0; part < 2; part++)
            for (int64_t t = start[part]; t < start[part] + visible->tokens[part]; t += LANES) {
                vec weight = vec_exp(load(row + t) - top);
                store(row + t, weight);
                sum += weight;
            }
        share[q] = 1.0f / reduce_add(sum);
        for (int64_t i = 0; i < padded; i += LANES) store(out + q * padded + i, broadcast(0.0f));
    }
#define VALUES(vectors) \
    tile_multiply(dtype, queries, vectors, left < PAGE ? left : PAGE, scores + start[part] + t, stride, 1, \
                  element(visible->pages[part][t / PAGE], visible->values + i, dtype), LANES, padded, out + i, padded, 1)
    for (int part = 0; part < 2; part++)
        for (int64_t t = 0, left = visible->tokens[part]; left > 0; t += PAGE, left -= PAGE) {
            int64_t i = 0;
            for (; i + VECTORS * LANES <= padded; i += VECTORS * LANES) VALUES(VECTORS);
            for (; i < padded; i += LANES) VALUES(1);
        }
#undef VALUES
    for (int q = 0; q < queries; q++)
        for (int64_t i = 0; i < padded; i += LANES) store(out + q * padded + i, load(out + q * padded + i) * share[q]);
}

INLINE void attend_typed(const enum dtype dtype, int64_t queries, int64_t size, int64_t padded, const float *query,
                         const struct visible *visible, float *scores, int64_t stride, float *out) {
    int64_t q = 0;
#define TOGETHER(count) \
    for (; q + count <= queries; q += count) \
        attend(dtype, count, size, padded, query + q * padded, visible, scores, stride, out + q * padded);
    if (QUERIES == 4) {
        TOGETHER(4)
    }
    TOGETHER(2) TOGETHER(1)
#undef TOGETHER
}

static void attend_all(enum dtype dtype, int64_t queries, int64_t size, int64_t padded, const float *query,
                       const struct visible *visible, float *scores, int64_t stride, float *out) {
#ifdef HAS_BF16
    if (dtype == BF16) {
        attend_typed(BF16, queries, size, padded, query, visible, scores, stride, out);
        return;
    }
#endif
    (void)dtype;
    attend_typed(FLOAT32, queries, size, padded, query, visible, scores, stride, out);
}
