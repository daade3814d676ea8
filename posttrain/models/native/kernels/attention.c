// Attention in training, forwards and backwards, over a forest of segments of ragged length.
//
// A segment's tokens see all tokens of its ancestors, and their own segment causally. The work is cut into trees and key
// heads: nothing outside a tree adds to the gradients of its keys, so threads share nothing, and every sum has one order
// however many threads there are.
//
// Segments come depth first. The tokens from the root to the current segment, the path, lie in a stack of columns: a
// segment packs its keys and values behind those of its parent, over those of an older sibling's subtree. So each segment
// is packed once, however many descendants see it. Gradients of keys and values are summed in the same columns, and are
// written out when the subtree is done.
//
//     S  head size    P  columns of the path    repeat  query heads of a key head
//
// Everything is float32. q, k and v may be parts of one tensor: strides are in numbers, from a token to the next.

#include "abi.h"
#include "gemm.h"
#include "threads.h"

#define QUERIES (4 * TILE_ROWS)  // whose scores are held at once

#define ATTENTION_FIELDS(FIELD) \
    FIELD(int64_t, trees) \
    FIELD(int64_t, heads) \
    FIELD(int64_t, kv_heads) \
    FIELD(int64_t, head_size) /* whole panels */ \
    FIELD(int64_t, threads) \
    FIELD(float, scale) /* of the scores */ \
    /* segments, depth first */ \
    FIELD(const int64_t *, root)   /* [trees + 1] the first segment of each tree */ \
    FIELD(const int64_t *, start)  /* [segments] its first token */ \
    FIELD(const int64_t *, length) /* [segments] */ \
    FIELD(const int64_t *, before) /* [segments] tokens of all its ancestors */ \
    FIELD(const int64_t *, parent) /* [segments] the segment that it continues, -1: none */ \
    FIELD(const float *, q) \
    FIELD(const float *, k) \
    FIELD(const float *, v) \
    FIELD(int64_t, q_stride) \
    FIELD(int64_t, k_stride) \
    FIELD(int64_t, v_stride) \
    FIELD(float *, out)            /* [T][heads][S] */ \
    FIELD(float *, logsumexp)      /* [T][heads], of the scores */ \
    FIELD(const float *, grad_out) /* [T][heads][S] */ \
    FIELD(float *, grad_q)         /* [T][heads][S] */ \
    FIELD(float *, grad_k)         /* [T][kv_heads][S] */ \
    FIELD(float *, grad_v)         /* [T][kv_heads][S] */ \
    FIELD(float *, scratch)        /* [threads][scratch_size] */ \
    FIELD(int64_t, scratch_size)   /* attention_scratch() */ \
    FIELD(int64_t, columns)        /* P, whole panels: at least as many tokens as a query sees */

STRUCTURE(attention, ATTENTION_FIELDS)

// -- products ---------------------------------------------------------------------------------------------------------

// c [rows][columns] (+)= a [rows][depth] b [depth][columns]. Columns are whole panels; the next one of b is b_panel further.
static void multiply(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, int64_t a_step,
                     const float *b, int64_t b_step, int64_t b_panel, float *c, int64_t c_row, int add) {
#define TILE(height) \
    case height: \
        tile_multiply(FLOAT32, height, 2, depth, a, a_row, a_step, b + j / PANEL * b_panel, LANES, b_step, c + j, c_row, add); \
        break;
    for (int64_t tiles = tiles_of(rows); rows > 0; tiles--) {
        const int64_t height = tile_height(rows, tiles);
        for (int64_t j = 0; j < columns; j += PANEL)
            switch (height) {
                EVERY_HEIGHT(TILE)
            }
        a += height * a_row, c += height * c_row, rows -= height;
    }
#undef TILE
}

// Rows [tokens][S] of a key head as they are: to[token][i].
static void copy_rows(const float *from, int64_t stride, int64_t tokens, int64_t size, float *to) {
    for (int64_t t = 0; t < tokens; t++) memcpy(to + t * size, from + t * stride, sizeof(float) * (size_t)size);
}

// The same transposed, from column `at` of the path on: panels of tokens [S][PANEL].
static void pack_panels(const float *from, int64_t stride, int64_t tokens, int64_t size, int64_t at, float *panels) {
    for (int64_t t = 0; t < tokens; t++) {
        float *to = panels + (at + t) / PANEL * PANEL * size + (at + t) % PANEL;
        for (int64_t i = 0; i < size; i++) to[i * PANEL] = from[t * stride + i];
    }
}

// -- the path ---------------------------------------------------------------------------------------------------------

struct path {  // what a thread holds of a tree and a key head
    float *weights;                             // [QUERIES][P]
    float *key_panels;                          // [P / PANEL][S][PANEL]
    float *values;                              // [P][S], forwards
    float *grad_scores;                         // [QUERIES][P], backwards from here on
    float *keys, *value_panels;                 // [P][S], [P / PANEL][S][PANEL]
    float *grad_keys, *grad_values;             // [P][S]
};

int64_t attention_scratch(int64_t size, int64_t columns, int backward) {
    return (1 + backward) * QUERIES * columns + (backward ? 5 : 2) * size * columns;
}

static struct path path_in(float *scratch, int64_t size, int64_t columns, int backward) {
    const int64_t scores = QUERIES * columns, numbers = size * columns;
    struct path p = {.weights = scratch, .key_panels = scratch + scores};
    float *rest = p.key_panels + numbers;
    if (!backward) {
        p.values = rest;
        return p;
    }
    p.grad_scores = rest, p.keys = rest + scores, p.value_panels = p.keys + numbers;
    p.grad_keys = p.value_panels + numbers, p.grad_values = p.grad_keys + numbers;
    return p;
}

static void push_segment(const struct attention *a, const struct path *p, int64_t segment, int64_t head) {
    const int64_t size = a->head_size, start = a->start[segment], tokens = a->length[segment], at = a->before[segment];
    const float *k = a->k + start * a->k_stride + head * size, *v = a->v + start * a->v_stride + head * size;
    pack_panels(k, a->k_stride, tokens, size, at, p->key_panels);
    if (p->values) {
        copy_rows(v, a->v_stride, tokens, size, p->values + at * size);
        return;
    }
    copy_rows(k, a->k_stride, tokens, size, p->keys + at * size);
    pack_panels(v, a->v_stride, tokens, size, at, p->value_panels);
    memset(p->grad_keys + at * size, 0, sizeof(float) * (size_t)(tokens * size));
    memset(p->grad_values + at * size, 0, sizeof(float) * (size_t)(tokens * size));
}

// Gradients of a segment whose subtree is done.
static void pop_segment(const struct attention *a, const struct path *p, int64_t segment, int64_t head) {
    const int64_t size = a->head_size, row = a->kv_heads * size, at = a->before[segment] * size;
    const int64_t first = a->start[segment] * row + head * size;
    for (int64_t t = 0; t < a->length[segment]; t++) {
        memcpy(a->grad_k + first + t * row, p->grad_keys + at + t * size, sizeof(float) * (size_t)size);
        memcpy(a->grad_v + first + t * row, p->grad_values + at + t * size, sizeof(float) * (size_t)size);
    }
}

// -- some queries of a segment ----------------------------------------------------------------------------------------

struct block {
    int64_t rows;      // queries
    int64_t token;     // the first one's
    int64_t head;      // query head
    int64_t visible;   // columns that the first one sees: all before it, and its own
    const float *q;
};

INLINE int64_t seen_by_last(const struct block *b) { return b->visible + b->rows - 1; }

// weights [rows][P] = exp(scores - logsumexp), 0 at columns that a query does not see, up to whole panels.
static void softmax(const struct attention *a, const struct block *b, const struct path *p, int known) {
    const int64_t width = round_up(seen_by_last(b), PANEL), size = a->head_size;
    multiply(b->rows, width, size, b->q, a->q_stride, 1, p->key_panels, PANEL, PANEL * size, p->weights, a->columns, 0);
    for (int64_t r = 0; r < b->rows; r++) {
        float *row = p->weights + r * a->columns, *logsumexp = a->logsumexp + (b->token + r) * a->heads + b->head;
        const int64_t visible = b->visible + r;
        for (int64_t t = visible; t < width; t++) row[t] = -INFINITY;
        if (!known) {
            vec most = broadcast(-INFINITY), sum = broadcast(0.0f);
            for (int64_t t = 0; t < visible; t += LANES) most = vec_max(load(row + t), most);
            const float top = reduce_max(most) * a->scale;
            for (int64_t t = 0; t < visible; t += LANES) sum += vec_exp(load(row + t) * a->scale - top);
            *logsumexp = top + logf(reduce_add(sum));
        }
        for (int64_t t = 0; t < width; t += LANES) store(row + t, vec_exp(load(row + t) * a->scale - *logsumexp));
    }
}

static void block_forward(const struct attention *a, const struct block *b, const struct path *p) {
    const int64_t size = a->head_size, row = a->heads * size;
    float *out = a->out + b->token * row + b->head * size;
    softmax(a, b, p, 0);
    multiply(b->rows, size, seen_by_last(b), p->weights, a->columns, 1, p->values, size, PANEL, out, row, 0);
}

static void block_backward(const struct attention *a, const struct block *b, const struct path *p) {
    const int64_t size = a->head_size, row = a->heads * size, at = b->token * row + b->head * size, columns = a->columns;
    const int64_t seen = seen_by_last(b), width = round_up(seen, PANEL);
    const float *grad = a->grad_out + at, *out = a->out + at;
    softmax(a, b, p, 1);
    multiply(seen, size, b->rows, p->weights, 1, columns, grad, row, PANEL, p->grad_values, size, 1);
    multiply(b->rows, width, size, grad, row, 1, p->value_panels, PANEL, PANEL * size, p->grad_scores, columns, 0);
    for (int64_t r = 0; r < b->rows; r++) {  // the gradient of softmax: weight * (gradient - its mean under the weights)
        vec product = broadcast(0.0f);
        for (int64_t i = 0; i < size; i += LANES) product += load(grad + r * row + i) * load(out + r * row + i);
        const float mean = reduce_add(product);
        const int64_t visible = b->visible + r;
        float *to = p->grad_scores + r * columns, *weight = p->weights + r * columns;
        for (int64_t t = 0; t < visible; t += LANES) store(to + t, load(weight + t) * (load(to + t) - mean) * a->scale);
        for (int64_t t = visible; t < width; t++) to[t] = 0.0f;  // of columns that nothing was packed into: may be NaN
    }
    multiply(b->rows, size, seen, p->grad_scores, columns, 1, p->keys, size, PANEL, a->grad_q + at, row, 0);
    multiply(seen, size, b->rows, p->grad_scores, 1, columns, b->q, a->q_stride, PANEL, p->grad_keys, size, 1);
}

// -- a tree and a key head --------------------------------------------------------------------------------------------

static void attend_tree(const struct attention *a, int64_t tree, int64_t head, float *scratch, int backward) {
    const struct path p = path_in(scratch, a->head_size, a->columns, backward);
    const int64_t repeat = a->heads / a->kv_heads, end = a->root[tree + 1];
    for (int64_t s = a->root[tree]; s < end; s++) {
        push_segment(a, &p, s, head);
        for (int64_t h = head * repeat; h < (head + 1) * repeat; h++)
            for (int64_t at = 0; at < a->length[s]; at += QUERIES) {
                const int64_t left = a->length[s] - at, token = a->start[s] + at;
                const struct block b = {
                    .rows = left < QUERIES ? left : QUERIES,
                    .token = token,
                    .head = h,
                    .visible = a->before[s] + at + 1,
                    .q = a->q + token * a->q_stride + h * a->head_size,
                };
                if (backward)
                    block_backward(a, &b, &p);
                else
                    block_forward(a, &b, &p);
            }
        const int64_t next = s + 1 < end ? a->parent[s + 1] : -1;  // the segment whose subtree goes on
        for (int64_t done = s; backward && done != next; done = a->parent[done]) pop_segment(a, &p, done, head);
    }
}

void attention(const struct attention *a, int backward) {
#pragma omp parallel for num_threads(a->threads) schedule(dynamic)
    for (int64_t work = 0; work < a->trees * a->kv_heads; work++)
        attend_tree(a, work / a->kv_heads, work % a->kv_heads, a->scratch + omp_get_thread_num() * a->scratch_size, backward);
}

int attention_panel(void) { return PANEL; }
