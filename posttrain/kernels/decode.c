// One decoding step of the decoder on a processor: a token for every running request, from embedding to draw.
//
// The whole step is one parallel region whose threads meet between its phases, so nothing is started, allocated or
// interpreted in between. Products read weights that were packed once for many steps. Every number of a row is added up
// in an order that does not depend on the other rows: what a request samples is the same bits whatever runs beside it.
//
//     B  rows (running requests)    K  inputs of a product    R  query heads per key head    S  head size
//
// Layouts (engines/compiled.py makes them):
//   weights, float32:    panels of two vectors of outputs, [outputs / PANEL][K][PANEL]
//   weights, bfloat16:   [outputs / 32][K / 2][32][2], as matrix tiles read them
//   gate and up:         each panel has a vector of gate's outputs, then the same of up's
//   keys in the cache:   blocks of a vector of tokens, [tokens / LANES][S][LANES]
//   values in the cache: [tokens][S]
// Rows of all buffers are padded with zeros to whole vectors.

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "vectors.h"
#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define QUERIES (LANES == 16 ? 4 : 2)  // that go through the cache together: as many as registers hold the sums of
#define VECTORS 4                      // of keys or values for each of these queries
#define TILED 32                       // rows of one tile in bfloat16
#define STRETCH 16                     // inputs of a product between two looks ahead
#define BLOCK 64                       // entries of the vocabulary that are summed before the running sum

struct product {
    const void *weight;
    const float *bias;  // padded to whole panels, or NULL
    int64_t inputs;     // K, padded where weights are bfloat16
    int64_t panels;
};

struct layer {
    const float *attention_norm, *mlp_norm;
    const float *qk_norm;  // [2][S], or NULL
    struct product qkv, o, gate_up, down;
};

struct model {
    int64_t layers, hidden, heads, kv_heads, size, intermediate, vocab, narrow;  // narrow: layers' weights are bfloat16
    float eps;
    const struct layer *layer;
    const float *embedding;  // [vocab][hidden]
    const float *norm;
    struct product head;
};

struct step {
    // which requests: [B] each unless said otherwise
    int64_t rows, threads, draws;  // draws: 0 where the step ends with hidden states
    const int32_t *order;      // rows, those of one prompt side by side
    const int32_t *prompt;     // which prompt of the cache
    const int32_t *prompted;   // tokens of each prompt, [prompts]
    int64_t *token;            // the last one; becomes the next
    int64_t *length;           // tokens of prompt and reply in the cache
    int64_t *count;            // tokens sampled
    const int64_t *budget, *seed;
    const float *temperature;
    uint8_t *ended;
    int64_t *tokens;  // [B][sampled_stride]
    float *logp;      // [B][sampled_stride]
    int64_t sampled_stride;
    const int64_t *eos;
    int64_t eos_count;
    // rotation, [positions][S]; the sign is in the first half of the sines
    const float *cos, *sin;
    // the cache: [layers][slots or prompts][kv_heads][tokens][padded S], float32 or bfloat16 as weights are
    void *own_keys, *own_values, *shared_keys, *shared_values;
    int64_t own_slots, own_tokens, shared_prompts, shared_tokens;
    // scratch
    float *x;         // [B][hidden]
    float *wide;      // [B][outputs of qkv]
    void *inputs[2];  // inputs of products, [B][hidden] and [B][heads * S or intermediate], in their type
    float *logits;    // [B][vocab], or hidden states [B][hidden]
    float *own;       // of each thread
    int64_t own_size;
    int64_t x_stride, wide_stride, inputs_stride[2], logits_stride;
    int32_t *taken;  // [phases] how far each has come
    double *spent;   // [kinds of work] seconds are added here; NULL: nobody asks
};

// -- threads ----------------------------------------------------------------------------------------------------------

struct team {
    _Atomic int32_t arrived, phase, threads;
};

static void meet(struct team *team) {
    int32_t phase = atomic_load_explicit(&team->phase, memory_order_acquire);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->threads - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->phase, phase + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->phase, memory_order_acquire) == phase; spins++) {
        if (spins > 2000) sched_yield();  // more threads than processors: let the others come
#if defined(__x86_64__) || defined(__i386__)
        else __builtin_ia32_pause();
#endif
    }
}

// The next piece of a phase's work that nobody has taken.
INLINE int64_t take(int32_t *taken) { return __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED); }

// -- numbers ----------------------------------------------------------------------------------------------------------

INLINE void put_one(void *row, int64_t at, float x, int64_t narrow) {
    if (narrow)
        ((uint16_t *)row)[at] = rounded(x);
    else
        ((float *)row)[at] = x;
}

INLINE void *row_of(void *base, int64_t row, int64_t stride, int64_t narrow) {
    return (char *)base + row * stride * (narrow ? 2 : 4);
}

INLINE int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// -- products ---------------------------------------------------------------------------------------------------------

enum use { WRITE, ADD, ACTIVATE };

// What becomes of a panel's outputs of a row.
INLINE void use_outputs(enum use use, vec one, vec other, void *out, int64_t panel, int narrow) {
    if (use == ACTIVATE) {  // silu(gate) * up
        put(out, panel * LANES, one / (1.0f + exponential(-one)) * other, narrow);
        return;
    }
    float *at = (float *)out + panel * PANEL;
    if (use == ADD) one += load(at), other += load(at + LANES);
    store(at, one);
    store(at + LANES, other);
}

// The weights that come after those at work: a stretch of them is asked for now and then.
struct ahead {
    const char *at, *end;
    int64_t bytes;
};

INLINE void fetch(struct ahead *ahead) {
    const char *to = ahead->at + ahead->bytes < ahead->end ? ahead->at + ahead->bytes : ahead->end;
    for (; ahead->at < to; ahead->at += 64) __builtin_prefetch(ahead->at, 0, 2);
}

// The next panel, of which every tile of this one asks for its part: a piece for each `stretch` of its inputs.
INLINE struct ahead ahead_of(const struct product *p, int64_t next, int64_t entry, int64_t stretch, int64_t tiles) {
    const int64_t bytes = entry * PANEL * p->inputs;
    const char *at = (const char *)p->weight + next * bytes;
    return (struct ahead){at, next < p->panels ? at + bytes : at, up(entry * PANEL * stretch / tiles, 64)};
}

INLINE void wide_tile(const int rows, const struct product *p, const float *in, int64_t in_stride, int64_t panel,
                      enum use use, float *out, int64_t out_stride, struct ahead *ahead) {
    vec sum[ROWS][2];
    for (int r = 0; r < rows; r++) {
        sum[r][0] = p->bias ? load(p->bias + panel * PANEL) : every(0.0f);
        sum[r][1] = p->bias ? load(p->bias + panel * PANEL + LANES) : every(0.0f);
    }
    const float *weight = (const float *)p->weight + panel * PANEL * p->inputs;
    for (int64_t k = 0; k < p->inputs;) {
        fetch(ahead);
        int64_t now = p->inputs - k < STRETCH ? p->inputs - k : STRETCH;
        add_up(rows, sum, now, in + k, in_stride, 1, weight, PANEL);
        k += now, weight += now * PANEL;
    }
    for (int r = 0; r < rows; r++) use_outputs(use, sum[r][0], sum[r][1], out + r * out_stride, panel, 0);
}

static void wide_panel(const struct product *p, const float *in, int64_t in_stride, int64_t rows, int64_t panel,
                       enum use use, float *out, int64_t out_stride, int64_t next) {
#define TILE(n) \
    case n: wide_tile(n, p, in, in_stride, panel, use, out, out_stride, &ahead); break;
    int64_t tiles = (rows + ROWS - 1) / ROWS;
    struct ahead ahead = ahead_of(p, next, sizeof(float), STRETCH, tiles);
    for (; rows > 0; tiles--) {
        int64_t now = (rows + tiles - 1) / tiles;  // tiles of about one height, none of a row or two beside full ones
        switch (now) {
            EVERY_HEIGHT(TILE)
        }
        in += now * in_stride;
        out += now * out_stride;
        rows -= now;
    }
#undef TILE
}

#ifdef __AMX_BF16__
static void open_tiles(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
    _tile_loadconfig(&shape);
}

// Sums 0 to 3: two times 16 rows by two times 16 outputs.
static void narrow_panel(const struct product *p, const uint16_t *in, int64_t in_stride, int64_t rows, int64_t panel,
                         enum use use, void *out, int64_t out_stride, int64_t next) {
    const int64_t tiles = (rows + TILED - 1) / TILED;
    struct ahead ahead = ahead_of(p, next, sizeof(uint16_t), 32, tiles);
    const uint16_t *packed = (const uint16_t *)p->weight + panel * PANEL * p->inputs;
    const float zero[LANES] = {0}, *bias = p->bias ? p->bias + panel * PANEL : NULL;
    const int64_t stride = 2 * in_stride;
    for (int64_t first = 0; first < rows; first += TILED) {
        float sums[TILED][PANEL] __attribute__((aligned(64)));
        const uint16_t *at = in + first * in_stride, *weight = packed;
        int two = rows - first > 16;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < p->inputs; k += 32, weight += 32 * PANEL) {
            fetch(&ahead);
            _tile_loadd(6, weight, 4 * PANEL);
            _tile_loadd(7, weight + PANEL, 4 * PANEL);
            _tile_loadd(4, at + k, stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (two) {
                _tile_loadd(5, at + 16 * in_stride + k, stride);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums[0], 4 * PANEL);
        _tile_stored(1, sums[0] + LANES, 4 * PANEL);
        _tile_stored(2, sums[16], 4 * PANEL);
        _tile_stored(3, sums[16] + LANES, 4 * PANEL);
        for (int64_t r = 0; r < TILED && first + r < rows; r++)
            use_outputs(use, load(sums[r]) + load(bias ? bias : zero), load(sums[r] + LANES) + load(bias ? bias + LANES : zero),
                        row_of(out, first + r, out_stride, use == ACTIVATE), panel, 1);
    }
}
#endif

static void multiply(const struct product *p, const void *in, int64_t in_stride, int64_t rows, enum use use, void *out,
                     int64_t out_stride, int narrow, int32_t *taken) {
    (void)narrow;  // without matrix tiles weights are float32
    for (int64_t panel = take(taken), next; panel < p->panels; panel = next) {
        next = take(taken);
#ifdef __AMX_BF16__
        if (narrow) {
            narrow_panel(p, in, in_stride, rows, panel, use, out, out_stride, next);
            continue;
        }
#endif
        wide_panel(p, in, in_stride, rows, panel, use, out, out_stride, next);
    }
}

// -- between the products ---------------------------------------------------------------------------------------------

INLINE float rate_of(const float *x, int64_t size, float eps) {
    vec sum = every(0.0f);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sum += load(x + i) * load(x + i);
    float rest = 0.0f;
    for (; i < size; i++) rest += x[i] * x[i];
    return 1.0f / sqrtf((total(sum) + rest) / (float)size + eps);
}

// Rows of x, normed, as inputs of a product. weight is padded with zeros to whole vectors.
static void norm(const struct model *m, const struct step *s, const float *weight, void *out, int64_t out_stride,
                 int narrow, int32_t *taken) {
    for (int64_t row; (row = take(taken)) < s->rows;) {
        const float *x = s->x + row * s->x_stride;
        float rate = rate_of(x, m->hidden, m->eps);
        void *to = row_of(out, row, out_stride, narrow);
        for (int64_t i = 0; i < m->hidden; i += LANES) put(to, i, load(x + i) * rate * load(weight + i), narrow);
    }
}

// One head, normed where the model does so, rotated and scaled.
INLINE void turn(const struct model *m, const float *x, const float *norm, const float *cos, const float *sin,
                 float scale, float *to) {
    int64_t size = m->size, half = size / 2;
    float rate = norm ? rate_of(x, size, m->eps) : 1.0f;
    for (int64_t i = 0; i < size; i++) {
        int64_t other = i < half ? i + half : i - half;
        float one = x[i], two = x[other];
        if (norm) one *= rate * norm[i], two *= rate * norm[other];
        to[i] = (one * cos[i] + two * sin[i]) * scale;
    }
}

struct seen {  // what a request looks at in one layer and head: its prompt, and its own tokens
    const void *keys[2], *values[2];
    int64_t tokens[2];
};

// scores[query][token] of a few vectors of tokens, from the one at first
INLINE void score(const int narrow, const int queries, const int vectors, int64_t size, int64_t padded, const float *query,
                  const void *keys, int64_t first, float *scores, int64_t stride) {
    vec sum[QUERIES][VECTORS];
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) sum[q][v] = every(0.0f);
    for (int64_t i = 0; i < size; i++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vec key = get(keys, (first + v * LANES) * padded + i * LANES, narrow);
#pragma GCC unroll 4
            for (int q = 0; q < queries; q++) sum[q][v] += key * query[q * padded + i];
        }
    }
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) store(scores + q * stride + first + v * LANES, sum[q][v]);
}

// to[query][i] += sum over tokens of weights[query][token] values[token][i], for a few vectors of i from the one at first
INLINE void mix(const int narrow, const int queries, const int vectors, int64_t padded, const float *weights, int64_t stride,
                const void *values, int64_t first, int64_t tokens, float *to) {
    vec sum[QUERIES][VECTORS];
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) sum[q][v] = load(to + q * padded + first + v * LANES);
    for (int64_t t = 0; t < tokens; t++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vec value = get(values, t * padded + first + v * LANES, narrow);
#pragma GCC unroll 4
            for (int q = 0; q < queries; q++) sum[q][v] += value * weights[q * stride + t];
        }
    }
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) store(to + q * padded + first + v * LANES, sum[q][v]);
}

// Softmax attention of a few queries [queries][padded] to all that is seen; to [queries][padded].
INLINE void attend(const int narrow, const int queries, int64_t size, int64_t padded, const float *query,
                   const struct seen *seen, float *scores, int64_t stride, float *to) {
    int64_t start[2] = {0, up(seen->tokens[0], LANES)};
    for (int part = 0; part < 2; part++) {
        const void *keys = seen->keys[part];
        float *at = scores + start[part];
        int64_t t = 0, left = seen->tokens[part];
        for (; left > VECTORS / 2 * LANES; t += VECTORS * LANES, left -= VECTORS * LANES)
            score(narrow, queries, VECTORS, size, padded, query, keys, t, at, stride);
        if (left > LANES)
            score(narrow, queries, VECTORS / 2, size, padded, query, keys, t, at, stride);
        else if (left > 0)
            score(narrow, queries, 1, size, padded, query, keys, t, at, stride);
        // those of the next part are written over what was computed beyond this one
    }
    float share[QUERIES];
    for (int q = 0; q < queries; q++) {
        float *row = scores + q * stride;
        vec top = every(-INFINITY), sum = every(0.0f);
        for (int part = 0; part < 2; part++) {
            int64_t end = start[part] + seen->tokens[part], whole = start[part] + up(seen->tokens[part], LANES);
            for (int64_t t = end; t < whole; t++) row[t] = -INFINITY;  // what lies there was never written, or is old
            for (int64_t t = start[part]; t < whole; t += LANES) top = greater(load(row + t), top);
        }
        float most = greatest(top);
        for (int part = 0; part < 2; part++)
            for (int64_t t = start[part]; t < start[part] + seen->tokens[part]; t += LANES) {
                vec weight = exponential(load(row + t) - most);
                store(row + t, weight);
                sum += weight;
            }
        share[q] = 1.0f / total(sum);
        for (int64_t i = 0; i < padded; i += LANES) store(to + q * padded + i, every(0.0f));
    }
    for (int part = 0; part < 2; part++) {
        const float *weights = scores + start[part];
        int64_t i = 0;
        for (; i + VECTORS * LANES <= padded; i += VECTORS * LANES)
            mix(narrow, queries, VECTORS, padded, weights, stride, seen->values[part], i, seen->tokens[part], to);
        for (; i < padded; i += LANES)
            mix(narrow, queries, 1, padded, weights, stride, seen->values[part], i, seen->tokens[part], to);
    }
    for (int q = 0; q < queries; q++)
        for (int64_t i = 0; i < padded; i += LANES) store(to + q * padded + i, load(to + q * padded + i) * share[q]);
}

INLINE void attend_all(const int narrow, int64_t queries, int64_t size, int64_t padded, const float *query,
                       const struct seen *seen, float *scores, int64_t stride, float *to) {
    int64_t q = 0;
#define TOGETHER(n) \
    for (; q + n <= queries; q += n) \
        attend(narrow, n, size, padded, query + q * padded, seen, scores, stride, to + q * padded);
    if (QUERIES == 4) {
        TOGETHER(4)
    }
    TOGETHER(2) TOGETHER(1)
#undef TOGETHER
}

// The new token of every request goes into the cache and looks at all before it.
static void attention(const struct model *m, const struct step *s, int64_t number, float *scratch, int32_t *taken) {
    const struct layer *l = m->layer + number;
    const int64_t size = m->size, padded = up(size, LANES), repeat = m->heads / m->kv_heads;
    const int64_t own_block = s->own_tokens * padded, shared_block = s->shared_tokens * padded;
    float *query = scratch, *key = query + repeat * padded, *out = key + padded, *scores = out + repeat * padded;
    const int64_t stride = (s->own_size - (2 * repeat + 1) * padded) / QUERIES;
    memset(query, 0, sizeof(float) * repeat * padded);
    for (int64_t item; (item = take(taken)) < s->rows * m->kv_heads;) {
        const int64_t head = item / s->rows, row = s->order[item % s->rows], prompt = s->prompt[row];
        const int64_t place = s->count[row] - 1;
        const float *cos = s->cos + s->length[row] * size, *sin = s->sin + s->length[row] * size;
        const float *qkv = s->wide + row * s->wide_stride;
        for (int64_t q = 0; q < repeat; q++)
            turn(m, qkv + (head * repeat + q) * size, l->qk_norm, cos, sin, 1.0f / sqrtf((float)size), query + q * padded);
        turn(m, qkv + (m->heads + head) * size, l->qk_norm ? l->qk_norm + size : NULL, cos, sin, 1.0f, key);
        const int64_t mine = ((number * s->own_slots + row) * m->kv_heads + head) * own_block;
        const int64_t ours = ((number * s->shared_prompts + prompt) * m->kv_heads + head) * shared_block;
        const int64_t at = mine + place / LANES * LANES * padded + place % LANES;
        for (int64_t i = 0; i < size; i++) put_one(s->own_keys, at + i * LANES, key[i], m->narrow);
        const float *value = qkv + (m->heads + m->kv_heads + head) * size;
        for (int64_t i = 0; i < size; i++) put_one(s->own_values, mine + place * padded + i, value[i], m->narrow);
        const struct seen seen = {
            {row_of(s->shared_keys, 1, ours, m->narrow), row_of(s->own_keys, 1, mine, m->narrow)},
            {row_of(s->shared_values, 1, ours, m->narrow), row_of(s->own_values, 1, mine, m->narrow)},
            {s->prompted[prompt], place + 1},
        };
        if (m->narrow)
            attend_all(1, repeat, size, padded, query, &seen, scores, stride, out);
        else
            attend_all(0, repeat, size, padded, query, &seen, scores, stride, out);
        void *to = row_of(s->inputs[1], row, s->inputs_stride[1], m->narrow);
        for (int64_t q = 0; q < repeat; q++)
            for (int64_t i = 0; i < size; i++) put_one(to, (head * repeat + q) * size + i, out[q * padded + i], m->narrow);
        // what pads the row is multiplied by zeros: it must be a number, and may be left from a wider product
        if (m->narrow && head == 0)
            for (int64_t i = m->heads * size; i < up(m->heads * size, TILED); i++) put_one(to, i, 0.0f, 1);
    }
}

// -- the draw ---------------------------------------------------------------------------------------------------------

static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// As engines/sampler.py: by inverting the cumulative distribution, first to a block of the vocabulary, then within it.
static void draw(const struct model *m, const struct step *s, int64_t row, float *scratch) {
    float *logits = s->logits + row * s->logits_stride, *mass = scratch;
    const int64_t vocab = m->vocab, count = s->count[row];
    const float temperature = s->temperature[row];
    int64_t token = 0;
    float logp = 0.0f;
    if (temperature == 0.0f) {
        for (int64_t i = 1; i < vocab; i++)
            if (logits[i] > logits[token]) token = i;
    } else {
        for (int64_t i = vocab; i < up(vocab, BLOCK); i++) logits[i] = -INFINITY;
        if (temperature != 1.0f) {
            float by = temperature > 1e-6f ? temperature : 1e-6f;
            for (int64_t i = 0; i < vocab; i += LANES) store(logits + i, load(logits + i) / by);
        }
        vec top = every(-INFINITY);
        for (int64_t i = 0; i < vocab; i += LANES) top = greater(load(logits + i), top);
        const float most = greatest(top);
        double all = 0.0;
        int64_t blocks = up(vocab, BLOCK) / BLOCK;
        float *each = mass + blocks * BLOCK;
        for (int64_t b = 0; b < blocks; b++) {
            vec sum = every(0.0f);
            for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; i += LANES) {
                vec x = exponential(load(logits + i) - most);
                store(mass + i, x);
                sum += x;
            }
            each[b] = total(sum);
            all += each[b];
        }
        uint64_t x = mixed(mixed((uint64_t)s->seed[row]) + (uint64_t)count * 0x9E3779B97F4A7C15u);
        double left = (double)(((float)((x >> 40) & 0xFFFFFF) + 0.5f) * 0x1p-24f) * all;
        int64_t block = 0;  // the first whose running sum exceeds the draw; by rounding none may: then the last with mass
        double within = left;
        for (int64_t b = 0; b < blocks; b++) {
            if (each[b] > 0.0f) block = b, within = left;
            if (each[b] > left) break;
            left -= each[b];
        }
        token = block * BLOCK;
        for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i++) {
            if (mass[i] > 0.0f) token = i;
            if (mass[i] > within) break;
            within -= mass[i];
        }
        logp = logits[token] - most - (float)log(all);
    }
    int ended = count + 1 >= s->budget[row];
    for (int64_t i = 0; i < s->eos_count; i++) ended |= s->eos[i] == token;
    s->token[row] = token;
    s->tokens[row * s->sampled_stride + count] = token;
    s->logp[row * s->sampled_stride + count] = logp;
    s->count[row] = count + 1;
    s->ended[row] = (uint8_t)ended;
}

// -- the step ---------------------------------------------------------------------------------------------------------

enum kind { PRODUCTS, ATTENTION, NORMS, DRAWS };  // of work

// The end of a phase: all threads meet, and the first one notes how long it took.
INLINE void phase(const struct step *s, struct team *team, int64_t thread, enum kind kind, struct timespec *since) {
    meet(team);
    if (thread || !s->spent) return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    s->spent[kind] += (double)(now.tv_sec - since->tv_sec) + 1e-9 * (double)(now.tv_nsec - since->tv_nsec);
    *since = now;
}

static void run(const struct model *m, const struct step *s, struct team *team, int64_t thread) {
    float *scratch = s->own + thread * s->own_size;
    int32_t *taken = s->taken;
    const int narrow = (int)m->narrow;
    void *hidden = s->inputs[0], *inner = s->inputs[1];
    const int64_t hidden_stride = s->inputs_stride[0], inner_stride = s->inputs_stride[1];
    struct timespec since;
    clock_gettime(CLOCK_MONOTONIC, &since);
#ifdef __AMX_BF16__
    if (narrow) open_tiles();
#endif
#define PHASE(kind, work) work, phase(s, team, thread, kind, &since), taken++
    for (int64_t row; (row = take(taken)) < s->rows;)
        memcpy(s->x + row * s->x_stride, m->embedding + s->token[row] * m->hidden, sizeof(float) * m->hidden);
    PHASE(NORMS, (void)0);
    for (int64_t n = 0; n < m->layers; n++) {
        const struct layer *l = m->layer + n;
        PHASE(NORMS, norm(m, s, l->attention_norm, hidden, hidden_stride, narrow, taken));
        PHASE(PRODUCTS, multiply(&l->qkv, hidden, hidden_stride, s->rows, WRITE, s->wide, s->wide_stride, narrow, taken));
        PHASE(ATTENTION, attention(m, s, n, scratch, taken));
        PHASE(PRODUCTS, multiply(&l->o, inner, inner_stride, s->rows, ADD, s->x, s->x_stride, narrow, taken));
        PHASE(NORMS, norm(m, s, l->mlp_norm, hidden, hidden_stride, narrow, taken));
        PHASE(PRODUCTS, multiply(&l->gate_up, hidden, hidden_stride, s->rows, ACTIVATE, inner, inner_stride, narrow, taken));
        PHASE(PRODUCTS, multiply(&l->down, inner, inner_stride, s->rows, ADD, s->x, s->x_stride, narrow, taken));
    }
#ifdef __AMX_BF16__
    if (narrow) _tile_release();
#endif
    if (!s->draws) {
        PHASE(NORMS, norm(m, s, m->norm, s->logits, s->logits_stride, 0, taken));
        return;
    }
    PHASE(NORMS, norm(m, s, m->norm, s->wide, s->wide_stride, 0, taken));
    PHASE(PRODUCTS, multiply(&m->head, s->wide, s->wide_stride, s->rows, WRITE, s->logits, s->logits_stride, 0, taken));
    for (int64_t row; (row = take(taken)) < s->rows;) draw(m, s, row, scratch);
    PHASE(DRAWS, (void)0);
#undef PHASE
}

int model_size(void) { return sizeof(struct model); }
int step_size(void) { return sizeof(struct step); }
int lanes(void) { return LANES; }
int phases(int layers) { return 7 * layers + 4; }

void decode(const struct model *m, const struct step *s) {
    struct team team = {0};
    memset(s->taken, 0, sizeof(int32_t) * phases((int)m->layers));
#pragma omp parallel num_threads(s->threads)
    {
        atomic_store(&team.threads, omp_get_num_threads());  // as many as there are, not as were asked for
        run(m, s, &team, omp_get_thread_num());
    }
    for (int64_t row = 0; row < s->rows; row++) s->length[row]++;
}

// Whether products in bfloat16 are to be had: the operating system lends the tiles on request.
int narrow(void) {
#ifdef __AMX_BF16__
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return 0;
#endif
}
