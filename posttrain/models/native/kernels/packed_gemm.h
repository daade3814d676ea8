// x W^T + b of few rows, with weights that were packed once for many steps.
//
//     B  rows    K  inputs
//
// Weights lie in panels of PANEL outputs, which threads claim one by one:
//   float32:  [panels][K][PANEL]
//   bf16:     [panels][K / 2][PANEL][2], pairs of inputs as AMX tiles and AVX-512's BF16 instructions read them (only where
//             the processor has either)
// A weight of gate and up has a vector of gate's outputs in each panel, then the same of up's.
#pragma once

#include "abi.h"
#include "gemm.h"
#include "row_ops.h"
#ifdef HAS_BF16
#include <immintrin.h>
#endif

#define AMX_ROWS 32       // of a pair of tiles
#define PREFETCH_STEP 16  // inputs between two prefetches

#define LINEAR_FIELDS(FIELD) \
    FIELD(const void *, weight) \
    FIELD(const float *, bias) /* padded to whole panels, or NULL */ \
    FIELD(int64_t, inputs)     /* K, padded to 32 where weights are bf16 */ \
    FIELD(int64_t, panels)

STRUCTURE(linear, LINEAR_FIELDS)

enum epilogue { WRITE, ADD, SWIGLU };

// Gives a panel's outputs of a row their place. SWIGLU's are of `dtype`, the others float32.
INLINE void write_outputs(enum epilogue epilogue, vec first, vec second, void *out, int64_t panel, enum dtype dtype) {
    if (epilogue == SWIGLU) {
        store_typed(out, panel * LANES, swiglu(first, second), dtype);
        return;
    }
    float *to = (float *)out + panel * PANEL;
    if (epilogue == ADD) first += load(to), second += load(to + LANES);
    store(to, first);
    store(to + LANES, second);
}

// The panel that this thread goes through next. While a panel is at work, each of its tiles prefetches its part of it: one
// piece for each `step` inputs.
struct prefetch {
    const char *at, *end;
    int64_t bytes;
};

INLINE struct prefetch prefetch_panel(const struct linear *l, int64_t panel, enum dtype dtype, int64_t step, int64_t tiles) {
    const int64_t bytes = size_of(dtype) * PANEL * l->inputs;
    const char *at = (const char *)l->weight + panel * bytes;
    return (struct prefetch){at, panel < l->panels ? at + bytes : at, round_up(size_of(dtype) * PANEL * step / tiles, 64)};
}

INLINE void prefetch_piece(struct prefetch *p) {
    const char *to = p->at + p->bytes < p->end ? p->at + p->bytes : p->end;
    for (; p->at < to; p->at += 64) __builtin_prefetch(p->at, 0, 2);
}

INLINE void linear_tile(const int rows, const struct linear *l, const float *in, int64_t in_stride, int64_t panel,
                        enum epilogue epilogue, float *out, int64_t out_stride, struct prefetch *prefetch) {
    vec sum[TILE_SUMS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++)
            sum[2 * r + v] = l->bias ? load(l->bias + panel * PANEL + v * LANES) : broadcast(0.0f);
    const float *weight = (const float *)l->weight + panel * PANEL * l->inputs;
    for (int64_t k = 0; k < l->inputs;) {
        prefetch_piece(prefetch);
        const int64_t depth = l->inputs - k < PREFETCH_STEP ? l->inputs - k : PREFETCH_STEP;
        tile_accumulate(FLOAT32, rows, 2, sum, depth, in + k, in_stride, 1, weight, LANES, PANEL);
        k += depth, weight += depth * PANEL;
    }
    for (int r = 0; r < rows; r++)
        write_outputs(epilogue, sum[2 * r], sum[2 * r + 1], out + r * out_stride, panel, FLOAT32);
}

static void linear_panel(const struct linear *l, const float *in, int64_t in_stride, int64_t rows, int64_t panel,
                         enum epilogue epilogue, float *out, int64_t out_stride, int64_t next) {
#define TILE(height) \
    case height: linear_tile(height, l, in, in_stride, panel, epilogue, out, out_stride, &prefetch); break;
    int64_t tiles = tiles_of(rows);
    struct prefetch prefetch = prefetch_panel(l, next, FLOAT32, PREFETCH_STEP, tiles);
    for (; rows > 0; tiles--) {
        const int64_t height = tile_height(rows, tiles);
        switch (height) {
            EVERY_HEIGHT(TILE)
        }
        in += height * in_stride, out += height * out_stride, rows -= height;
    }
#undef TILE
}

#ifdef __AMX_BF16__
static void amx_configure(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
    _tile_loadconfig(&shape);
}

// Tiles 0 to 3 hold the sums of 2 times 16 rows and 2 times 16 outputs. Rows are read in pairs of tiles: the last ones may
// lie beyond `rows`, where buffers have room, and are not written.
static void linear_panel_bf16(const struct linear *l, const uint16_t *in, int64_t in_stride, int64_t rows, int64_t panel,
                              enum epilogue epilogue, void *out, int64_t out_stride, int64_t next) {
    struct prefetch prefetch = prefetch_panel(l, next, BF16, 32, (rows + AMX_ROWS - 1) / AMX_ROWS);
    const uint16_t *packed = (const uint16_t *)l->weight + panel * PANEL * l->inputs;
    const vec none = broadcast(0.0f);
    const float *bias = l->bias ? l->bias + panel * PANEL : NULL;
    const int64_t stride = 2 * in_stride;  // bytes
    for (int64_t first = 0; first < rows; first += AMX_ROWS) {
        float sums[AMX_ROWS][PANEL] __attribute__((aligned(64)));
        const uint16_t *at = in + first * in_stride, *weight = packed;
        const int second = rows - first > 16;  // half of the rows
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < l->inputs; k += 32, weight += 32 * PANEL) {
            prefetch_piece(&prefetch);
            _tile_loadd(6, weight, 4 * PANEL);
            _tile_loadd(7, weight + PANEL, 4 * PANEL);
            _tile_loadd(4, at + k, stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (second) {
                _tile_loadd(5, at + 16 * in_stride + k, stride);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums[0], 4 * PANEL);
        _tile_stored(1, sums[0] + LANES, 4 * PANEL);
        _tile_stored(2, sums[16], 4 * PANEL);
        _tile_stored(3, sums[16] + LANES, 4 * PANEL);
        for (int64_t r = 0; r < AMX_ROWS && first + r < rows; r++)
            write_outputs(epilogue, load(sums[r]) + (bias ? load(bias) : none),
                          load(sums[r] + LANES) + (bias ? load(bias + LANES) : none),
                          element(out, (first + r) * out_stride, epilogue == SWIGLU ? BF16 : FLOAT32), panel, BF16);
    }
}
#elif defined(__AVX512BF16__)
INLINE void linear_tile_bf16(const int rows, const struct linear *l, const uint16_t *in, int64_t in_stride, int64_t panel,
                             enum epilogue epilogue, void *out, int64_t out_stride, struct prefetch *prefetch) {
    __m512 sum[TILE_SUMS];
    for (int i = 0; i < 2 * rows; i++) sum[i] = _mm512_setzero_ps();
    const uint16_t *weight = (const uint16_t *)l->weight + panel * PANEL * l->inputs;
    for (int64_t k = 0; k < l->inputs; k += 32) {
        prefetch_piece(prefetch);
        for (int64_t i = k; i < k + 32; i += 2, weight += 2 * PANEL) {
            const __m512bh first = (__m512bh)_mm512_loadu_si512(weight);
            const __m512bh second = (__m512bh)_mm512_loadu_si512(weight + PANEL);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                int32_t pair;
                memcpy(&pair, in + r * in_stride + i, sizeof pair);
                const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
                sum[2 * r] = _mm512_dpbf16_ps(sum[2 * r], x, first);
                sum[2 * r + 1] = _mm512_dpbf16_ps(sum[2 * r + 1], x, second);
            }
        }
    }
    const vec none = broadcast(0.0f);
    const float *bias = l->bias ? l->bias + panel * PANEL : NULL;
    for (int r = 0; r < rows; r++)
        write_outputs(epilogue, (vec)sum[2 * r] + (bias ? load(bias) : none),
                      (vec)sum[2 * r + 1] + (bias ? load(bias + LANES) : none),
                      element(out, r * out_stride, epilogue == SWIGLU ? BF16 : FLOAT32), panel, BF16);
}

static void linear_panel_bf16(const struct linear *l, const uint16_t *in, int64_t in_stride, int64_t rows, int64_t panel,
                              enum epilogue epilogue, void *out, int64_t out_stride, int64_t next) {
#define TILE(height) \
    case height: linear_tile_bf16(height, l, in, in_stride, panel, epilogue, out, out_stride, &prefetch); break;
    int64_t tiles = tiles_of(rows);
    struct prefetch prefetch = prefetch_panel(l, next, BF16, 32, tiles);
    for (; rows > 0; tiles--) {
        const int64_t height = tile_height(rows, tiles);
        switch (height) {
            EVERY_HEIGHT(TILE)
        }
        in += height * in_stride, rows -= height;
        out = element(out, height * out_stride, epilogue == SWIGLU ? BF16 : FLOAT32);
    }
#undef TILE
}
#endif
