// The microkernel of every matrix product: a tile of c (+)= a b that is held in registers while it goes through the depth.
//
// Each number of c is summed by itself, in the order of the depth: its bits do not depend on the tile that it lies in, so
// neither on the other rows nor on the number of threads.
#pragma once

#include "dtype.h"

#define PANEL (2 * LANES)             // columns of a tile
#define TILE_SUMS (2 * TILE_ROWS)     // vectors of c that registers hold
#if LANES == 16
#define TILE_ROWS 12  // at most: 24 sums, 2 vectors of b and a number of a fill 32 registers
#define EVERY_HEIGHT(CASE) \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#else
#define TILE_ROWS 6  // the same with 16 registers
#define EVERY_HEIGHT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif

// Rows are cut into tiles of about one height: none of a row or two beside full ones, which would load b for little work.
INLINE int64_t tiles_of(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }
INLINE int64_t tile_height(int64_t rows, int64_t tiles) { return (rows + tiles - 1) / tiles; }

// sum[rows][vectors] += over `depth` of a[row, i] * b[i, vector]. Steps are in numbers: a_row and a_step from a row of a
// and from a number of the depth to the next, b_vector and b_step likewise. b is float32 or bf16.
INLINE void tile_accumulate(const enum dtype dtype, const int rows, const int vectors, vec *sum, int64_t depth,
                            const float *a, int64_t a_row, int64_t a_step, const void *b, int64_t b_vector,
                            int64_t b_step) {
    for (int64_t i = 0; i < depth; i++) {
        vec column[4];  // `vectors` of them
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) column[v] = load_typed(b, i * b_step + v * b_vector, dtype);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            float x = a[r * a_row + i * a_step];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[r * vectors + v] += column[v] * x;
        }
    }
}

// c[rows][vectors] (+)= a b, with c_row numbers from a row of c to the next.
INLINE void tile_multiply(const enum dtype dtype, const int rows, const int vectors, int64_t depth, const float *a,
                          int64_t a_row, int64_t a_step, const void *b, int64_t b_vector, int64_t b_step, float *c,
                          int64_t c_row, int add) {
    vec sum[TILE_SUMS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r * vectors + v] = add ? load(c + r * c_row + v * LANES) : broadcast(0.0f);
    tile_accumulate(dtype, rows, vectors, sum, depth, a, a_row, a_step, b, b_vector, b_step);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(c + r * c_row + v * LANES, sum[r * vectors + v]);
}
