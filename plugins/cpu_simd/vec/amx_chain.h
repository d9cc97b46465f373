/* SPDX-License-Identifier: Apache-2.0 */
/* Chains of tile products: a block of 32 x 32 sums stays in registers 0 .. 3 while products of 32 x
 * 32 x 32 are added, four tdpbf16ps of 16 cycles for four tile loads of 8. Loads of b bypass L1,
 * which keeps rows, sums and probabilities. */
#ifndef CPU_SIMD_AMX_CHAIN_H
#define CPU_SIMD_AMX_CHAIN_H

#include "amx_pack.h"

/* The destination of what the tile registers hold. */
struct chain {
    float *to; /* where it belongs; NULL: nowhere */
    int64_t stride;
};

/* Tile intrinsics do not say which memory they touch. */
INLINE void tiles_and_memory(void)
{
    __asm__ volatile("" : : : "memory");
}

/* Product i, a constant, of the four of c += a b of 32 x 32 x 32; a's rows are `stride` elements
 * apart, b's two tiles adjacent. Vector instructions may come between the products. */
INLINE void chain_product(const int i, const uint16_t *a, int64_t stride, const uint16_t *b)
{
    tiles_and_memory();
    switch (i) {
    case 0:
        _tile_loadd(4, a, stride * 2);
        _tile_stream_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        break;
    case 1:
        _tile_stream_loadd(7, b + TILE_ELEMENTS, 64);
        _tile_dpbf16ps(1, 4, 7);
        break;
    case 2:
        _tile_loadd(5, a + 16 * stride, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        break;
    default:
        _tile_dpbf16ps(3, 5, 7);
    }
    tiles_and_memory();
}

INLINE void chain_continue(const uint16_t *a, int64_t stride, const uint16_t *b)
{
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        chain_product(i, a, stride, b);
    }
}

/* Stores registers 0 .. 3 at their destination and zeroes them. */
#define CHAIN_TURN(i)                                                                              \
    if (chain->to != NULL) {                                                                       \
        _tile_stored(i, chain->to + (i) / 2 * 16 * chain->stride + (i) % 2 * 16,                   \
                     chain->stride * 4);                                                           \
    }                                                                                              \
    if (from != NULL) {                                                                            \
        _tile_loadd(i, from + (i) / 2 * 16 * from_stride + (i) % 2 * 16, from_stride * 4);         \
    } else {                                                                                       \
        _tile_zero(i);                                                                             \
    }

/* The first product of a chain. The sums of the chain before are stored one register at a time,
 * between products: four tile stores in a row would stall all that follows. */
INLINE void chain_begin(struct chain *chain, const uint16_t *a, int64_t stride, const uint16_t *b,
                        const float *from, int64_t from_stride)
{
    tiles_and_memory();
    _tile_loadd(4, a, stride * 2);
    _tile_stream_loadd(6, b, 64);
    CHAIN_TURN(0)
    _tile_dpbf16ps(0, 4, 6);
    _tile_stream_loadd(7, b + TILE_ELEMENTS, 64);
    CHAIN_TURN(1)
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + 16 * stride, stride * 2);
    CHAIN_TURN(2)
    _tile_dpbf16ps(2, 5, 6);
    CHAIN_TURN(3)
    _tile_dpbf16ps(3, 5, 7);
    tiles_and_memory();
}
#undef CHAIN_TURN

/* A chain from zero, to be stored at `to`; the one before has ended. */
INLINE void chain_zero(struct chain *chain, float *to, int64_t stride)
{
    *chain = (struct chain){to, stride};
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

INLINE void chain_end(struct chain *chain)
{
    float *c = chain->to;
    int64_t stride = chain->stride;
    if (c != NULL) {
        _tile_stored(0, c, stride * 4);
        _tile_stored(1, c + 16, stride * 4);
        _tile_stored(2, c + 16 * stride, stride * 4);
        _tile_stored(3, c + 16 * stride + 16, stride * 4);
        tiles_and_memory();
    }
    chain->to = NULL;
}

#endif
