// Intel AMX in plain C, in the place of the compiler's header, so that products in bf16 run on every processor:
//     -I tests/emulated -D__AMX_BF16__=1 -D__AVX512F__=1
// Tiles of 16 rows of 64 bytes. Sums are in the processor's order: pairs of inputs, one after the other.
#pragma once

#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define syscall(...) 0  // the operating system's leave to use tiles

static _Thread_local union {
    float f[16][16];
    uint16_t h[16][32];
} emulated_tile[8];

static inline float emulated_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline void emulated_load(int tile, const void *base, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy(emulated_tile[tile].f[r], (const char *)base + r * stride, 64);
}

static inline void emulated_store(int tile, void *base, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy((char *)base + r * stride, emulated_tile[tile].f[r], 64);
}

static inline void emulated_dpbf16ps(int sum, int a, int b) {
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < 32; k++)
            for (int c = 0; c < 16; c++)
                emulated_tile[sum].f[r][c] += emulated_bf16(emulated_tile[a].h[r][k]) *
                                              emulated_bf16(emulated_tile[b].h[k / 2][2 * c + k % 2]);
}

#define _tile_loadconfig(shape) (void)(shape)
#define _tile_release() (void)0
#define _tile_zero(tile) memset(&emulated_tile[tile], 0, sizeof(emulated_tile[tile]))
#define _tile_loadd(tile, base, stride) emulated_load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated_store(tile, base, stride)
#define _tile_dpbf16ps(sum, a, b) emulated_dpbf16ps(sum, a, b)
