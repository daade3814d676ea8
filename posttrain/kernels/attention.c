// Attention in training, forwards and backwards, over segments of ragged length of which some continue a prefix.
//
// The work is cut into families and key heads: a family is a segment and all that continue it. Nobody else adds to the
// gradients of its keys, so threads share nothing, and sums have one order however many threads there are.
//
//     S  head size    n, p  tokens of a segment and of its prefix    repeat  query heads per key head
//
// Everything is float32. q, k and v may lie in one tensor: strides are numbers from a token to the next.

#include "vectors.h"

#define QUERIES (4 * ROWS)  // whose scores are held at once

struct attention {
    int64_t families, heads, kv_heads, size, threads;
    float scale;
    const int64_t *first;  // [families + 1] its first segment
    const int64_t *start, *length, *prefix_start, *prefix_length;  // [segments]
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride;
    float *out, *mass;                // [T][heads][S], [T][heads]: the logsumexp of the scores
    const float *grad;                // of out
    float *to_q, *to_k, *to_v;        // [T][heads or kv_heads][S]; those of keys and values come as zeros
    float *room;                      // of each thread
    int64_t room_size, room_row;      // room_row: at least as many tokens as a query sees, in whole panels
};

// -- products ---------------------------------------------------------------------------------------------------------

// c[rows][PANEL] (+)= sum over `depth` of a[row, i] b[i][PANEL]; entries of a lie anywhere.
INLINE void tile(const int rows, int64_t depth, const float *a, int64_t a_row, int64_t a_next, const float *b,
                 int64_t b_next, float *c, int64_t c_row, int add) {
    vec sum[ROWS][2];
    for (int r = 0; r < rows; r++) {
        sum[r][0] = add ? load(c + r * c_row) : every(0.0f);
        sum[r][1] = add ? load(c + r * c_row + LANES) : every(0.0f);
    }
    add_up(rows, sum, depth, a, a_row, a_next, b, b_next);
    for (int r = 0; r < rows; r++) {
        store(c + r * c_row, sum[r][0]);
        store(c + r * c_row + LANES, sum[r][1]);
    }
}

// c [rows][columns] (+)= a [rows][depth] b [depth][columns]; columns are whole panels, each b_panel behind the last.
static void multiply(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, int64_t a_next,
                     const float *b, int64_t b_next, int64_t b_panel, float *c, int64_t c_row, int add) {
    int64_t tiles = (rows + ROWS - 1) / ROWS;
#define TILE(n) \
    case n: tile(n, depth, a, a_row, a_next, b + j / PANEL * b_panel, b_next, c + j, c_row, add); break;
    for (; rows > 0; tiles--) {
        int64_t now = (rows + tiles - 1) / tiles;
        for (int64_t j = 0; j < columns; j += PANEL)
            switch (now) {
                EVERY_HEIGHT(TILE)
            }
        a += now * a_row, c += now * c_row, rows -= now;
    }
#undef TILE
}

// Keys or values of tokens, from column `at` on: as they are, to[at + t][i], and turned, in panels of tokens [S][PANEL].
static void lay(const float *from, int64_t stride, int64_t tokens, int64_t size, int64_t at, float *plain, float *turned) {
    if (plain)
        for (int64_t t = 0; t < tokens; t++) memcpy(plain + (at + t) * size, from + t * stride, sizeof(float) * (size_t)size);
    if (turned)
        for (int64_t t = at; t < at + tokens; t++) {
            float *to = turned + t / PANEL * PANEL * size + t % PANEL;
            for (int64_t i = 0; i < size; i++) to[i * PANEL] = from[(t - at) * stride + i];
        }
}

INLINE int64_t panels_of(int64_t count) { return (count + PANEL - 1) / PANEL * PANEL; }

// -- a family and a key head ------------------------------------------------------------------------------------------

struct block {  // some queries of a segment, and what they see
    int64_t rows;         // how many
    int64_t before, own;  // tokens of the prefix, and of the segment before the first query
    int64_t width;        // most that one of them sees, in whole panels
    const float *q;
};

// weights [rows][room_row] = exp(scores - mass), 0 where a query does not look; without `known` masses these are found.
static void weigh(const struct attention *a, const struct block *b, const float *keys, float *weights, float *mass,
                  int known) {
    multiply(b->rows, b->width, a->size, b->q, a->q_stride, 1, keys, PANEL, PANEL * a->size, weights, a->room_row, 0);
    for (int64_t r = 0; r < b->rows; r++) {
        float *row = weights + r * a->room_row, *its = mass + r * a->heads;
        const int64_t sees = b->before + b->own + r + 1;
        for (int64_t t = sees; t < b->width; t++) row[t] = -INFINITY;
        if (!known) {
            vec top = every(-INFINITY), sum = every(0.0f);
            for (int64_t t = 0; t < sees; t += LANES) top = greater(load(row + t), top);
            const float most = greatest(top) * a->scale;
            for (int64_t t = 0; t < sees; t += LANES) sum += exponential(load(row + t) * a->scale - most);
            *its = most + logf(total(sum));
        }
        for (int64_t t = 0; t < b->width; t += LANES) store(row + t, exponential(load(row + t) * a->scale - *its));
    }
}

static void go(const struct attention *a, int64_t family, int64_t head, float *room, int backward) {
    const int64_t size = a->size, repeat = a->heads / a->kv_heads, each = a->room_row * size, next = a->room_row;
    const int64_t kv_row = a->kv_heads * size, row = a->heads * size;
    float *weights = room, *keys_turned = weights + QUERIES * next, *values = keys_turned + each;
    float *shares = values + each, *keys = shares + QUERIES * next, *values_turned = values;  // backwards
    if (backward)
        values = NULL;
    else
        keys = values_turned = NULL;
    float *to_k = a->to_k + head * size, *to_v = a->to_v + head * size;
    int64_t held = -1;  // the prefix whose keys and values lie there
    for (int64_t s = a->first[family]; s < a->first[family + 1]; s++) {
        const int64_t start = a->start[s], length = a->length[s], before = a->prefix_length[s], root = a->prefix_start[s];
        for (int own = before && held != root ? 0 : 1; own < 2; own++) {
            const int64_t from = own ? start : root, tokens = own ? length : before, at = own ? before : 0;
            lay(a->k + from * a->k_stride + head * size, a->k_stride, tokens, size, at, keys, keys_turned);
            lay(a->v + from * a->v_stride + head * size, a->v_stride, tokens, size, at, values, values_turned);
        }
        held = before ? root : -1;
        for (int64_t h = head * repeat; h < (head + 1) * repeat; h++)
            for (int64_t at = 0; at < length; at += QUERIES) {
                struct block b = {.rows = length - at < QUERIES ? length - at : QUERIES, .before = before, .own = at};
                const int64_t token = start + at, mine = at + b.rows, seen = before + mine;  // mine: of its own tokens
                b.width = panels_of(seen), b.q = a->q + token * a->q_stride + h * size;
                float *out = a->out + token * row + h * size;
                weigh(a, &b, keys_turned, weights, a->mass + token * a->heads + h, backward);
                if (!backward) {
                    multiply(b.rows, size, seen, weights, next, 1, values, size, PANEL, out, row, 0);
                    continue;
                }
                const float *grad = a->grad + token * row + h * size;
                multiply(before, size, b.rows, weights, 1, next, grad, row, PANEL, to_v + root * kv_row, kv_row, 1);
                multiply(mine, size, b.rows, weights + before, 1, next, grad, row, PANEL, to_v + start * kv_row, kv_row, 1);
                multiply(b.rows, b.width, size, grad, row, 1, values_turned, PANEL, PANEL * size, shares, next, 0);
                for (int64_t r = 0; r < b.rows; r++) {
                    vec along = every(0.0f);
                    for (int64_t i = 0; i < size; i += LANES) along += load(grad + r * row + i) * load(out + r * row + i);
                    const float mean = total(along);
                    const int64_t sees = before + at + r + 1;
                    float *share = shares + r * next, *weight = weights + r * next;
                    for (int64_t t = 0; t < sees; t += LANES)
                        store(share + t, load(weight + t) * (load(share + t) - mean) * a->scale);
                    for (int64_t t = sees; t < b.width; t++) share[t] = 0.0f;  // what was computed there is no number
                }
                multiply(b.rows, size, seen, shares, next, 1, keys, size, PANEL, a->to_q + token * row + h * size, row, 0);
                multiply(before, size, b.rows, shares, 1, next, b.q, a->q_stride, PANEL, to_k + root * kv_row, kv_row, 1);
                multiply(mine, size, b.rows, shares + before, 1, next, b.q, a->q_stride, PANEL, to_k + start * kv_row, kv_row, 1);
            }
    }
}

void attention(const struct attention *a, int backward) {
    extern int omp_get_thread_num(void);
#pragma omp parallel for num_threads(a->threads) schedule(dynamic)
    for (int64_t work = 0; work < a->families * a->kv_heads; work++)
        go(a, work / a->kv_heads, work % a->kv_heads, a->room + omp_get_thread_num() * a->room_size, backward);
}

int attention_size(void) { return sizeof(struct attention); }
int panel(void) { return PANEL; }
int queries(void) { return QUERIES; }
