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
    bool narrow; /* 32 x 16 sums in registers 0 and 1 */
};

/* Tile intrinsics do not say which memory they touch. */
INLINE void tiles_and_memory(void)
{
    __asm__ volatile("" : : : "memory");
}

/* Empty instructions after a tile instruction, where no others come: in the slower state of a core
 * (README) tile instructions in a row take twice as long, and 8 to 32 of any others between them
 * suffice. In the faster state these take no time. */
INLINE void tile_gap(void)
{
    __asm__ volatile(".rept 16\n\tnop\n\t.endr");
}

/* Stores register i at the chain's destination and loads what the next chain adds to, or zeroes it.
 */
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
#define CHAIN_PRODUCT(i, a, b)                                                                     \
    if (begins) {                                                                                  \
        CHAIN_TURN(i)                                                                              \
    }                                                                                              \
    _tile_dpbf16ps(i, a, b);

enum { CHAIN_OPERATIONS = 8 };

/* Operation i of those of c += a b of 32 x 32 x 32, four loads and four products; a's rows are
 * `stride` elements apart, b's two tiles adjacent. Vector instructions may come between them.
 * `begins`, a constant: these are the first of a chain, and the sums of the chain before are stored
 * one register at a time, since four tile stores in a row would stall all that follows. */
INLINE void chain_operation(const int i, const uint16_t *a, int64_t stride, const uint16_t *b,
                            const int begins, const struct chain *chain, const float *from,
                            int64_t from_stride)
{
    tiles_and_memory();
    switch (i) {
    case 0:
        _tile_loadd(4, a, stride * 2);
        break;
    case 1:
        _tile_stream_loadd(6, b, 64);
        break;
    case 2:
        CHAIN_PRODUCT(0, 4, 6)
        break;
    case 3:
        _tile_stream_loadd(7, b + TILE_ELEMENTS, 64);
        break;
    case 4:
        CHAIN_PRODUCT(1, 4, 7)
        break;
    case 5:
        _tile_loadd(5, a + 16 * stride, stride * 2);
        break;
    case 6:
        CHAIN_PRODUCT(2, 5, 6)
        break;
    default:
        CHAIN_PRODUCT(3, 5, 7)
    }
    if (i == 0 || i == 1 || i == 3 || i == 5) {
        tile_gap();
    }
    tiles_and_memory();
}
#undef CHAIN_TURN
#undef CHAIN_PRODUCT

INLINE void chain_continue(const uint16_t *a, int64_t stride, const uint16_t *b)
{
#pragma GCC unroll 8
    for (int i = 0; i < CHAIN_OPERATIONS; i++) {
        chain_operation(i, a, stride, b, 0, NULL, NULL, 0);
        tile_gap();
    }
}

/* The first products of a chain, whose sums go to `to` when the next one begins. */
INLINE void chain_begin(struct chain *chain, const uint16_t *a, int64_t stride, const uint16_t *b,
                        const float *from, float *to, int64_t to_stride)
{
#pragma GCC unroll 8
    for (int i = 0; i < CHAIN_OPERATIONS; i++) {
        chain_operation(i, a, stride, b, 1, chain, from, to_stride);
        tile_gap();
    }
    *chain = (struct chain){to, to_stride, false};
}

INLINE void chain_end(struct chain *chain)
{
    float *c = chain->to;
    int64_t stride = chain->stride;
    if (c != NULL && chain->narrow) {
        _tile_stored(0, c, stride * 4);
        _tile_stored(1, c + 16 * stride, stride * 4);
        tiles_and_memory();
    } else if (c != NULL) {
        _tile_stored(0, c, stride * 4);
        _tile_stored(1, c + 16, stride * 4);
        _tile_stored(2, c + 16 * stride, stride * 4);
        _tile_stored(3, c + 16 * stride + 16, stride * 4);
        tiles_and_memory();
    }
    chain->to = NULL;
}

#endif
