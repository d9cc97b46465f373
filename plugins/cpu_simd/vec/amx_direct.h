/* SPDX-License-Identifier: Apache-2.0 */
/* Decode of 5 to 16 rows on AMX, keys and values read where they lie: MLA's heads, and the heads of
 * several queries over one key head.
 *
 * Scores: keys are the left operand, 16 of a tile where they lie, and queries the right one. 64
 * keys of 576 dims: 72 tdpbf16ps (1152 cycles), of queries that are transposed once an item.
 * Values: two rows are interleaved into pairs (2 loads, 2 shuffles and 2 stores for 32 columns); 64
 * keys of 512 columns: 64 tdpbf16ps (1024 cycles), 2048 stores. Vectors would take 544 cycles a
 * key. */
#ifndef CPU_SIMD_AMX_DIRECT_H
#define CPU_SIMD_AMX_DIRECT_H

#include "amx_chain.h"
#include "bf16_direct.h"

enum { AMX_LEAST_ROWS = 5, TILE_ROWS = 16 };

/* A burst of prefetches that is asked for `share` times in each of few steps, too many lines for L1
 * and the buffers of its misses. */
struct bursts {
    struct burst burst;
    int32_t share;
};

INLINE struct bursts bursts_begin(const struct direct_args *args, int32_t steps)
{
    int32_t share = (args->next_keys + steps - 1) / steps;
    share = share > 1 ? share : 1;
    struct bursts bursts = {burst_begin(args, steps * share), share};
    bursts.burst.far = true;
    return bursts;
}

INLINE void bursts_step(struct bursts *bursts)
{
    for (int32_t i = 0; i < bursts->share; i++) {
        prefetch_burst(&bursts->burst);
    }
}

/* Rows as right operands, a unit of 64 bytes of all of them behind the other: of each unit
 * [16][rows] of 4 bytes, which for fewer than 16 rows are read as overlapping rows of a tile. */
static void amx_pack_rows(void *q, void *memory, int32_t rows, int32_t depth)
{
    const __mmask16 some = (__mmask16)((1u << rows) - 1u);
    float *out = q;
    memcpy(memory, q, (size_t)rows * (size_t)depth * 2);
    for (const uint16_t *from = memory; from < (uint16_t *)memory + depth; from += 32) {
        __m512 block[TILE_ROWS];
#pragma GCC unroll 16
        for (int32_t i = 0; i < TILE_ROWS; i++) {
            block[i] = i < rows ? _mm512_loadu_ps(from + (int64_t)i * depth) : _mm512_setzero_ps();
        }
        vf_transpose(block);
#pragma GCC unroll 16
        for (int32_t i = 0; i < TILE_ROWS; i++, out += rows) {
            _mm512_mask_storeu_ps(out, some, block[i]);
        }
    }
}

static void amx_direct_pack(void *q, void *memory, int32_t rows, int32_t depth)
{
    if (rows >= AMX_LEAST_ROWS) {
        amx_pack_rows(q, memory, rows, depth);
    }
}

/* 16 keys from `first` on: where they lie, or NULL if they are not equally far from each other. */
INLINE const uint16_t *amx_keys(const struct direct_args *args, int32_t first, int64_t *stride)
{
    if (first + TILE_ROWS > args->keys) {
        return NULL;
    }
    const char *const *rows = args->key_rows + first;
    *stride = rows[1] - rows[0];
    for (int32_t i = 2; i < TILE_ROWS; i++) {
        if (rows[i] - rows[i - 1] != *stride) {
            return NULL;
        }
    }
    return (const uint16_t *)(rows[0] + args->offset);
}

/* A tile of 16 keys by 32 dims, through `copy` where they do not lie as a tile does. */
#define AMX_LOAD_KEYS(tile, group)                                                                 \
    if (place[group] != NULL) {                                                                    \
        _tile_loadd(tile, place[group] + 32 * c, stride[group]);                                   \
    } else {                                                                                       \
        for (int32_t i = 0; i < TILE_ROWS; i++) {                                                  \
            const uint16_t *key = key_row(args, TILE_ROWS * (group) + i) + 32 * c;                 \
            _mm512_store_si512(copy[(group) % 2] + 32 * i, _mm512_loadu_si512(key));               \
        }                                                                                          \
        tiles_and_memory();                                                                        \
        _tile_loadd(tile, copy[(group) % 2], 64);                                                  \
    }

#define AMX_SCORES(group, tile)                                                                    \
    if ((group) < groups) {                                                                        \
        AMX_LOAD_KEYS(tile, group)                                                                 \
        _tile_dpbf16ps(group, tile, 6);                                                            \
        bursts_step(&bursts);                                                                      \
    }

static void amx_direct_scores(float *scores, const void *q, const struct direct_args *args)
{
    if (args->rows < AMX_LEAST_ROWS) {
        bf16_direct_scores(scores, q, args);
        return;
    }
    _Alignas(64) uint16_t copy[2][TILE_ELEMENTS];
    _Alignas(64) float sums[DIRECT_KEYS / TILE_ROWS][TILE_ROWS * TILE_ROWS];
    const int32_t chunks = args->depth / 32, groups = (args->keys + TILE_ROWS - 1) / TILE_ROWS;
    const uint16_t *place[DIRECT_KEYS / TILE_ROWS];
    int64_t stride[DIRECT_KEYS / TILE_ROWS] = {0};
    struct bursts bursts = bursts_begin(args, chunks * groups);
    for (int32_t g = 0; g < groups; g++) {
        place[g] = amx_keys(args, g * TILE_ROWS, &stride[g]);
    }
    tiles_and_memory();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int32_t c = 0; c < chunks; c++) {
        _tile_loadd(6, (const uint16_t *)q + (int64_t)32 * c * args->rows, 4 * (int64_t)args->rows);
        AMX_SCORES(0, 4)
        AMX_SCORES(1, 5)
        AMX_SCORES(2, 4)
        AMX_SCORES(3, 5)
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    tiles_and_memory();
    for (int32_t g = 0; g < groups; g++) {
        __m512 block[TILE_ROWS];
#pragma GCC unroll 16
        for (int32_t i = 0; i < TILE_ROWS; i++) {
            block[i] = _mm512_load_ps(sums[g] + TILE_ROWS * i);
        }
        vf_transpose(block);
#pragma GCC unroll 16
        for (int32_t r = 0; r < TILE_ROWS; r++) {
            if (r < args->rows) {
                _mm512_storeu_ps(scores + (int64_t)r * SCORE_STRIDE + g * TILE_ROWS, block[r]);
            }
        }
    }
}
#undef AMX_SCORES
#undef AMX_LOAD_KEYS

/* Up to 32 keys' probabilities of 16 rows; what is behind them is never looked at. */
INLINE void amx_load_probabilities(uint16_t *left, const uint16_t *p, int32_t rows, int32_t keys)
{
    __mmask32 some = keys >= 32 ? 0xffffffffu : (1u << keys) - 1u;
#pragma GCC unroll 16
    for (int32_t r = 0; r < TILE_ROWS; r++) {
        __m512i row = _mm512_setzero_si512();
        if (r < rows) {
            row = _mm512_maskz_loadu_epi16(some, p + (int64_t)r * 2 * SCORE_STRIDE);
        }
        _mm512_store_si512(left + 32 * r, row);
    }
}

/* Keys first .. first + 31, columns column .. column + 31: two tiles in bf16_direct's order. */
INLINE void amx_pack_pairs(uint16_t *packed, const struct direct_args *args, int32_t first,
                           int32_t column, struct bursts *bursts)
{
    const uint16_t *zero = args->zero_row;
#pragma GCC unroll 4
    for (int32_t i = 0; i < TILE_ROWS; i++) {
        int32_t j = first + 2 * i;
        const uint16_t *even = j < args->keys ? key_row(args, j) : zero;
        const uint16_t *odd = j + 1 < args->keys ? key_row(args, j + 1) : zero;
        __m512i x = _mm512_loadu_si512(even + column);
        __m512i y = _mm512_loadu_si512(odd + column);
        _mm512_store_si512(packed + 32 * i, _mm512_unpacklo_epi16(x, y));
        _mm512_store_si512(packed + TILE_ELEMENTS + 32 * i, _mm512_unpackhi_epi16(x, y));
        bursts_step(bursts);
    }
}

static void amx_direct_values(float *acc, const void *p, const struct direct_args *args)
{
    if (args->rows < AMX_LEAST_ROWS) {
        bf16_direct_values(acc, p, args);
        return;
    }
    _Alignas(64) uint16_t left[2][TILE_ELEMENTS], pairs[2][2][2 * TILE_ELEMENTS];
    _Alignas(64) float sums[TILE_ROWS][32];
    const int32_t steps = (args->keys + 31) / 32;
    struct bursts bursts = bursts_begin(args, args->depth / 32 * steps * TILE_ROWS);
    for (int32_t s = 0; s < steps; s++) {
        amx_load_probabilities(left[s], (const uint16_t *)p + 32 * s, args->rows,
                               args->keys - 32 * s);
    }
    memset(sums, 0, sizeof sums);
    tiles_and_memory();
    _tile_loadd(4, left[0], 64);
    if (steps > 1) {
        _tile_loadd(5, left[1], 64);
    }
    for (int32_t column = 0; column < args->depth; column += 32) {
        uint16_t(*packed)[2 * TILE_ELEMENTS] = pairs[column / 32 % 2];
        float *out = acc + column;
        int64_t stride = args->depth;
        if (args->rows < TILE_ROWS) { /* a tile has 16, the accumulator fewer */
            out = sums[0];
            stride = 32;
            for (int32_t r = 0; r < args->rows; r++) {
                memcpy(sums[r], acc + (int64_t)r * args->depth + column, sizeof sums[r]);
            }
        }
        for (int32_t s = 0; s < steps; s++) {
            amx_pack_pairs(packed[s], args, 32 * s, column, &bursts);
        }
        tiles_and_memory();
        _tile_loadd(0, out, stride * 4);
        _tile_loadd(1, out + 16, stride * 4);
        _tile_loadd(6, packed[0], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, packed[0] + TILE_ELEMENTS, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (steps > 1) {
            _tile_loadd(6, packed[1], 64);
            _tile_dpbf16ps(0, 5, 6);
            _tile_loadd(7, packed[1] + TILE_ELEMENTS, 64);
            _tile_dpbf16ps(1, 5, 7);
        }
        _tile_stored(0, out, stride * 4);
        _tile_stored(1, out + 16, stride * 4);
        tiles_and_memory();
        for (int32_t r = 0; r < args->rows && args->rows < TILE_ROWS; r++) {
            memcpy(acc + (int64_t)r * args->depth + column, sums[r], sizeof sums[r]);
        }
    }
}

static const struct direct_engine amx_direct = {.scores = amx_direct_scores,
                                                .values = amx_direct_values,
                                                .finish = bf16_direct_finish,
                                                .pack = amx_direct_pack,
                                                .half_tile_rows = AMX_LEAST_ROWS};

#endif
