// One decoding step on a processor: a token for every running request, from embedding to sampling.
//
// The whole step is one parallel region. Its phases (a norm, a product, attention ...) end with a barrier; within a phase
// threads claim pieces of work by a counter, so nothing is started, allocated or interpreted in between. Every number of a
// row is summed in an order that does not depend on the other rows: what a request samples is the same bits whatever runs
// beside it.
//
//     B  rows (running requests)    S  head size    D  head size padded to whole vectors    K  inputs of a product
//
// engines/local/compiled_step.py packs weights and cache as packed_gemm.h and decode_attention.h read them. Strides are in numbers.
// Rows of all buffers are padded to whole vectors; what pads an input of a product is 0 from the start and stays so.

#include <assert.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "decode_attention.h"
#include "packed_gemm.h"
#include "row_ops.h"
#include "sampler.h"
#include "threads.h"
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define LAYER_FIELDS(FIELD) \
    FIELD(const float *, attention_norm) \
    FIELD(const float *, mlp_norm) \
    FIELD(const float *, qk_norm) /* [2][S], or NULL */ \
    FIELD(struct linear, qkv) \
    FIELD(struct linear, o) \
    FIELD(struct linear, gate_up) \
    FIELD(struct linear, down)

STRUCTURE(layer, LAYER_FIELDS)

#define MODEL_FIELDS(FIELD) \
    FIELD(int64_t, layers) \
    FIELD(int64_t, hidden) \
    FIELD(int64_t, heads) \
    FIELD(int64_t, kv_heads) \
    FIELD(int64_t, head_size) \
    FIELD(int64_t, vocab) \
    FIELD(int64_t, dtype) /* of the layers' weights, the inputs of their products and the cache */ \
    FIELD(float, eps) \
    FIELD(const struct layer *, layer) \
    FIELD(const float *, embedding) /* [vocab][hidden] */ \
    FIELD(const float *, norm) \
    FIELD(struct linear, head) /* float32 always */

STRUCTURE(model, MODEL_FIELDS)

#define STEP_FIELDS(FIELD) \
    FIELD(int64_t, rows) \
    FIELD(int64_t, threads) \
    /* requests: [B] each unless said otherwise */ \
    FIELD(const int32_t *, order)         /* rows, those of one prompt side by side */ \
    FIELD(const int32_t *, group)         /* [groups + 1] where the rows of each slot begin in order; NULL: each is alone */ \
    FIELD(int64_t, groups) \
    FIELD(const int32_t *, slot)          /* its row of the tables below; NULL: that of the row */ \
    FIELD(int64_t, draws)                 /* 0: no token is drawn, only keys and values are wanted */ \
    FIELD(const int32_t *, prompt_length) /* [slots] */ \
    FIELD(void *const *, pages)           /* [slots][pages_stride] of the KV cache: the prompt's, then its own */ \
    FIELD(int64_t, pages_stride) \
    FIELD(int64_t *, token)               /* the last one; becomes the next */ \
    FIELD(int64_t *, length)              /* tokens of prompt and reply in the cache; becomes one more */ \
    FIELD(int64_t *, count)               /* tokens sampled; becomes one more */ \
    FIELD(const int64_t *, budget) \
    FIELD(const int64_t *, seed) \
    FIELD(const float *, temperature) \
    FIELD(const uint8_t *, filtered) /* top-p, top-k or epsilon: its token is drawn elsewhere */ \
    FIELD(uint8_t *, ended) \
    FIELD(int64_t *, tokens) /* [B][sampled_stride] */ \
    FIELD(float *, logp)     /* [B][sampled_stride] */ \
    FIELD(int64_t, sampled_stride) \
    FIELD(const int64_t *, eos) /* [eos_count] */ \
    FIELD(int64_t, eos_count) \
    /* rotary embedding, [positions][S]; the sign is in the first half of the sines */ \
    FIELD(const float *, cos) \
    FIELD(const float *, sin) \
    /* buffers, one row for each of B and some more */ \
    FIELD(float *, x)       /* the residual stream [hidden] */ \
    FIELD(void *, normed)   /* [hidden], of the model's dtype */ \
    FIELD(float *, qkv)     /* [outputs of qkv] */ \
    FIELD(void *, attended) /* [heads * S], of the model's dtype */ \
    FIELD(void *, inner)    /* [intermediate], of the model's dtype */ \
    FIELD(float *, last)    /* hidden states after the last norm [hidden] */ \
    FIELD(float *, logits)  /* [vocab in whole blocks] */ \
    FIELD(int64_t, hidden_stride) /* of x, normed and last */ \
    FIELD(int64_t, qkv_stride) \
    FIELD(int64_t, attended_stride) \
    FIELD(int64_t, inner_stride) \
    FIELD(int64_t, logits_stride) \
    FIELD(float *, scratch)       /* [threads][scratch_size] */ \
    FIELD(int64_t, scratch_size)  /* decode_scratch() */ \
    FIELD(int32_t *, counters)    /* [decode_phases()] pieces of work that were claimed */ \
    FIELD(double *, seconds)      /* [kinds of work] time is added here; NULL: nobody asks */

STRUCTURE(step, STEP_FIELDS)

enum kind { PRODUCTS, ATTENTION, NORMS, SAMPLING };  // of work

// How many phases a step has: the counters that it needs.
int64_t decode_phases(const struct model *m) { return 4 + 7 * m->layers; }

// -- threads ----------------------------------------------------------------------------------------------------------

struct barrier {
    _Atomic int32_t arrived, generation, threads;
};

// OpenMP's own may put threads to sleep: phases take microseconds.
static void barrier_wait(struct barrier *b) {
    const int32_t generation = atomic_load_explicit(&b->generation, memory_order_acquire);
    if (atomic_fetch_add_explicit(&b->arrived, 1, memory_order_acq_rel) == b->threads - 1) {
        atomic_store_explicit(&b->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&b->generation, generation + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&b->generation, memory_order_acquire) == generation; spins++) {
        if (spins > 2000) sched_yield();  // more threads than processors: let the others run
#if defined(__x86_64__) || defined(__i386__)
        else __builtin_ia32_pause();
#endif
    }
}

struct worker {  // a thread in a step
    const struct model *m;
    const struct step *s;
    struct barrier *barrier;
    int64_t thread;
    float *scratch;
    int32_t *counter, *counters_end;  // of the phase at work
    struct timespec since;
};

// The next piece of the phase's work that no thread has claimed.
INLINE int64_t claim(struct worker *w) {
    assert(w->counter < w->counters_end && "decode_phases() promises fewer phases than run() has");
    return __atomic_fetch_add(w->counter, 1, __ATOMIC_RELAXED);
}

// Every thread waits until all are done with the phase; the first one notes how long it took.
static void end_phase(struct worker *w, enum kind kind) {
    barrier_wait(w->barrier);
    w->counter++;
    if (w->thread || !w->s->seconds) return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    w->s->seconds[kind] += (double)(now.tv_sec - w->since.tv_sec) + 1e-9 * (double)(now.tv_nsec - w->since.tv_nsec);
    w->since = now;
}

// -- phases -----------------------------------------------------------------------------------------------------------

static void embed(struct worker *w) {
    const struct model *m = w->m;
    const struct step *s = w->s;
    for (int64_t row; (row = claim(w)) < s->rows;)
        memcpy(s->x + row * s->hidden_stride, m->embedding + s->token[row] * m->hidden, sizeof(float) * (size_t)m->hidden);
}

static void norm(struct worker *w, const float *weight, void *out, enum dtype dtype) {
    const struct model *m = w->m;
    const struct step *s = w->s;
    for (int64_t row; (row = claim(w)) < s->rows;) {
        const float *x = s->x + row * s->hidden_stride;
        rms_scale(x, rms_rate(x, m->hidden, m->eps), weight, m->hidden, element(out, row * s->hidden_stride, dtype), dtype);
    }
}

static void product(struct worker *w, const struct linear *l, const void *in, int64_t in_stride, enum dtype dtype,
                    enum epilogue epilogue, void *out, int64_t out_stride) {
    const int64_t rows = w->s->rows;
    for (int64_t panel = claim(w), next; panel < l->panels; panel = next) {
        next = claim(w);
#ifdef HAS_BF16
        if (dtype == BF16) {
            linear_panel_bf16(l, in, in_stride, rows, panel, epilogue, out, out_stride, next);
            continue;
        }
#endif
        (void)dtype;
        linear_panel(l, in, in_stride, rows, panel, epilogue, out, out_stride, next);
    }
}

// A head of q or k: normed where the model does so, rotated, scaled.
INLINE void rotate_head(const struct model *m, const float *x, const float *norm, const float *cos, const float *sin,
                        float scale, float *out) {
    const int64_t size = m->head_size;
    if (norm) {
        rms_scale(x, rms_rate(x, size, m->eps), norm, size, out, FLOAT32);
        x = out;
    }
    rope(x, cos, sin, sin + size / 2, size, out, FLOAT32);
    if (scale != 1.0f)
        for (int64_t i = 0; i < size; i++) out[i] *= scale;
}

struct attention_scratch {
    float *query, *key, *out, *scores;  // [repeat][D], [D], [repeat][D], [QUERIES][scores_stride]
    int64_t scores_stride;
};

static struct attention_scratch attention_scratch(const struct model *m, float *base, int64_t visible) {
    const int64_t padded = round_up(m->head_size, LANES), queries = m->heads / m->kv_heads * padded;
    return (struct attention_scratch){
        .query = base,
        .key = base + queries,
        .out = base + queries + padded,
        .scores = base + 2 * queries + padded,
        .scores_stride = visible,
    };
}

// Numbers of scratch that each thread needs for requests that see so many tokens, as many as the cache has room for.
int64_t decode_scratch(const struct model *m, int64_t visible) {
    float *base = NULL;
    const int64_t attention = attention_scratch(m, base, visible).scores - base + QUERIES * visible;
    const int64_t sampler = sampler_scratch(m->vocab);
    return round_up(attention > sampler ? attention : sampler, PANEL);
}

// A page of the KV cache: [keys, values][layers][kv_heads][PAGE][D].
//
// The new token's keys and values go into the cache, then its queries look at all that is there. A piece of work is a
// request and a key head, which touches no other's part of the cache; of several tokens of a request one after the other,
// so that each gives the bits that it gives alone.
static void attention(struct worker *w, int64_t layer) {
    const struct model *m = w->m;
    const struct step *s = w->s;
    const enum dtype dtype = (enum dtype)m->dtype;
    const float *qk_norm = m->layer[layer].qk_norm, scale = 1.0f / sqrtf((float)m->head_size);
    const int64_t size = m->head_size, padded = round_up(size, LANES), repeat = m->heads / m->kv_heads;
    const struct attention_scratch a = attention_scratch(m, w->scratch, s->pages_stride * PAGE);
    const int keys_alone = !s->draws && layer == m->layers - 1;  // nobody reads what comes behind them
    memset(a.query, 0, sizeof(float) * (size_t)(repeat * padded));  // also what pads them
    for (int64_t piece; (piece = claim(w)) < s->groups * m->kv_heads;) {
        const int64_t head = piece / s->groups, group = piece % s->groups;
        const int64_t keys = (layer * m->kv_heads + head) * PAGE * padded, values = keys + m->layers * m->kv_heads * PAGE * padded;
        const int64_t first = s->group ? s->group[group] : group, end = s->group ? s->group[group + 1] : group + 1;
        for (int64_t at = first; at < end; at++) {
            const int64_t row = s->order[at], slot = s->slot ? s->slot[row] : row, shared = s->prompt_length[slot];
            const int64_t place = s->length[row] - shared;
            void *const *prompt = s->pages + slot * s->pages_stride, *const *own = prompt + pages_of(shared);
            const float *cos = s->cos + s->length[row] * size, *sin = s->sin + s->length[row] * size;
            const float *qkv = s->qkv + row * s->qkv_stride, *value = qkv + (m->heads + m->kv_heads + head) * size;
            for (int64_t q = 0; q < repeat && !keys_alone; q++)
                rotate_head(m, qkv + (head * repeat + q) * size, qk_norm, cos, sin, scale, a.query + q * padded);
            rotate_head(m, qkv + (m->heads + head) * size, qk_norm ? qk_norm + size : NULL, cos, sin, 1.0f, a.key);
            const int64_t t = place % PAGE, block = keys + t / LANES * LANES * padded + t % LANES;
            for (int64_t i = 0; i < size; i++) {
                store_one(own[place / PAGE], block + i * LANES, a.key[i], dtype);
                store_one(own[place / PAGE], values + t * padded + i, value[i], dtype);
            }
            if (keys_alone) continue;
            const struct visible visible = {{prompt, own}, {shared, place + 1}, keys, values};
            attend_all(dtype, repeat, size, padded, a.query, &visible, a.scores, a.scores_stride, a.out);
            void *out = element(s->attended, row * s->attended_stride + head * repeat * size, dtype);
            for (int64_t q = 0; q < repeat; q++)
                for (int64_t i = 0; i < size; i++) store_one(out, q * size + i, a.out[q * padded + i], dtype);
        }
    }
}

static void sampling(struct worker *w) {
    const struct model *m = w->m;
    const struct step *s = w->s;
    for (int64_t row; (row = claim(w)) < s->rows;) {
        if (s->filtered[row]) continue;
        float *logits = s->logits + row * s->logits_stride;
        const float temperature = s->temperature[row];
        const int64_t count = s->count[row], place = row * s->sampled_stride + count;
        const struct sample sample =
            temperature == 0.0f ? greedy_token(logits, m->vocab)
                                : draw_token(logits, m->vocab, temperature, uniform(s->seed[row], count), w->scratch);
        int ended = count + 1 >= s->budget[row];
        for (int64_t i = 0; i < s->eos_count; i++) ended |= s->eos[i] == sample.token;
        s->token[row] = s->tokens[place] = sample.token;
        s->logp[place] = sample.logp;
        s->count[row] = count + 1;
        s->ended[row] = (uint8_t)ended;
    }
}

// -- the step ---------------------------------------------------------------------------------------------------------

// At the end of each phase a barrier. In general: what one phase wrote row by row, or head by head, the next one reads as
// columns of panels, or the other way round; so a thread reads what others wrote.
static void run(struct worker *w) {
    const struct model *m = w->m;
    const struct step *s = w->s;
    const enum dtype dtype = (enum dtype)m->dtype;
#ifdef __AMX_BF16__
    if (dtype == BF16) amx_configure();
#endif
    embed(w);
    end_phase(w, NORMS);  // the norm may claim a row of x that another thread is still embedding
    for (const struct layer *l = m->layer; l < m->layer + m->layers; l++) {
        norm(w, l->attention_norm, s->normed, dtype);
        end_phase(w, NORMS);  // each panel of the product reads every row of normed
        product(w, &l->qkv, s->normed, s->hidden_stride, dtype, WRITE, s->qkv, s->qkv_stride);
        end_phase(w, PRODUCTS);  // attention reads q, k and v of a head, which are outputs of several panels
        attention(w, l - m->layer);
        end_phase(w, ATTENTION);  // each panel reads all heads of every row of attended
        if (!s->draws && l == m->layer + m->layers - 1) break;
        product(w, &l->o, s->attended, s->attended_stride, dtype, ADD, s->x, s->hidden_stride);
        end_phase(w, PRODUCTS);  // the norm reads whole rows of x, to which each panel adds a part
        norm(w, l->mlp_norm, s->normed, dtype);
        end_phase(w, NORMS);  // each panel of the product reads every row of normed
        product(w, &l->gate_up, s->normed, s->hidden_stride, dtype, SWIGLU, s->inner, s->inner_stride);
        end_phase(w, PRODUCTS);  // each panel reads whole rows of inner, of which each panel of gate_up wrote a part
        product(w, &l->down, s->inner, s->inner_stride, dtype, ADD, s->x, s->hidden_stride);
        end_phase(w, PRODUCTS);  // the next norm reads whole rows of x
    }
#ifdef __AMX_BF16__
    if (dtype == BF16) _tile_release();
#endif
    if (!s->draws) return;
    norm(w, m->norm, s->last, FLOAT32);
    end_phase(w, NORMS);  // each panel of the head reads every row of last
    product(w, &m->head, s->last, s->hidden_stride, FLOAT32, WRITE, s->logits, s->logits_stride);
    end_phase(w, PRODUCTS);  // sampling reads whole rows of logits
    sampling(w);
    end_phase(w, SAMPLING);  // for its time alone: the parallel region ends with a barrier of its own
    assert(w->counter == w->counters_end && "decode_phases() promises more phases than run() has");
}

void decode(const struct model *m, const struct step *s) {
    struct barrier barrier = {0};
    const int64_t phases = decode_phases(m);
    memset(s->counters, 0, sizeof(int32_t) * (size_t)phases);
#pragma omp parallel num_threads(s->threads)
    {
        atomic_store(&barrier.threads, omp_get_num_threads());  // as many as there are, not as were asked for
        const int64_t thread = omp_get_thread_num();
        struct worker worker = {m, s, &barrier, thread, s->scratch + thread * s->scratch_size, s->counters,
                                s->counters + phases, {0}};
        clock_gettime(CLOCK_MONOTONIC, &worker.since);
        run(&worker);
    }
    for (int64_t row = 0; row < s->rows; row++) s->length[row]++;
}

int decode_lanes(void) { return LANES; }
int decode_page(void) { return PAGE; }
int decode_vocab_block(void) { return VOCAB_BLOCK; }

// Whether there are products in bf16. The operating system lends AMX's tiles when it is asked.
int decode_bf16(void) {
#ifdef __AMX_BF16__
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };  // of arch_prctl
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#elif defined(HAS_BF16)
    return 1;
#else
    return 0;
#endif
}
