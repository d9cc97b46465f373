/* SPDX-License-Identifier: Apache-2.0 */
/* A tile of keys for all rows of an item on AMX: scores, softmax and values of 32 rows by 32 keys
 * at a time, so that tiles and vectors work at once. While the vectors turn the scores of one unit
 * (32 x 32) into probabilities, the tiles compute the scores of the next and part of the output of
 * the block of rows before.
 *
 * A unit at head size 128: 32 tdpbf16ps of 16 cycles beside 64 vectors of 10 instructions on two
 * ports; 24 KiB of keys and values and the accumulators come from L2.
 *
 * Packed tiles of b, 1 KiB each: keys [column / 32][depth / 32][2][16 depth pairs][16 keys][2],
 * values [width / 32][key / 32][2][16 key pairs][16 columns][2] with the pairs (i, i + 16) of 32
 * keys: two vectors of scores become pairs by a shift and a blend. */
#ifndef CPU_SIMD_AMX_FLASH_H
#define CPU_SIMD_AMX_FLASH_H

#include "bf16_engine.h"

enum {
    UNIT = FLASH_ROWS,             /* rows, and keys */
    UNIT_STEPS = TILE_KEYS / UNIT, /* most units of a block */
    TILE_ELEMENTS = 512            /* bf16 of one tile register */
};

struct flash_state {
    _Alignas(64) float scores[2][UNIT * UNIT];
    _Alignas(64) uint16_t p[2][UNIT_STEPS][UNIT * UNIT]; /* of this block and the one before */
    _Alignas(64) float lanes[UNIT][16];                  /* sums of a row of this block */
    _Alignas(64) float minus[UNIT];                      /* less the reference */
    const struct flash_args *args;
};

/* A 32-key part of a block. */
struct flash_unit {
    int32_t block;
    int32_t step; /* column / 32 */
};

/* Tile intrinsics do not say which memory they touch. */
INLINE void tiles_and_memory(void)
{
    __asm__ volatile("" : : : "memory");
}

/* c += a b of 32 x 32 x 32; a's rows are `stride` elements apart, b's two tiles adjacent */
INLINE void flash_multiply(const uint16_t *a, int64_t stride, const uint16_t *b)
{
    tiles_and_memory();
    _tile_loadd(4, a, stride * 2);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + TILE_ELEMENTS, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + 16 * stride, stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

INLINE void flash_zero(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

INLINE void flash_load(const float *c, int64_t stride)
{
    tiles_and_memory();
    _tile_loadd(0, c, stride * 4);
    _tile_loadd(1, c + 16, stride * 4);
    _tile_loadd(2, c + 16 * stride, stride * 4);
    _tile_loadd(3, c + 16 * stride + 16, stride * 4);
}

INLINE void flash_store(float *c, int64_t stride)
{
    _tile_stored(0, c, stride * 4);
    _tile_stored(1, c + 16, stride * 4);
    _tile_stored(2, c + 16 * stride, stride * 4);
    _tile_stored(3, c + 16 * stride + 16, stride * 4);
    tiles_and_memory();
}

/* Bits of the unit's columns that a row sees. */
INLINE uint32_t flash_visible(const struct flash_args *args, int32_t row, int32_t column)
{
    int32_t low = args->low[row] - column;
    int32_t high = args->high[row] - column;
    uint32_t from = low <= 0 ? 0xffffffffu : low >= UNIT ? 0 : 0xffffffffu << low;
    uint32_t to = high <= 0 ? 0 : high >= UNIT ? 0xffffffffu : ~(0xffffffffu << high);
    return from & to;
}

/* 2^x + 2^-8 of its power of two: truncation to bf16 then rounds to nearest. */
INLINE __m512 flash_exp2(__m512 x)
{
    __m512 f = _mm512_reduce_ps(x, 0x09);
    __m512 p = _mm512_set1_ps(0.0780245227f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.226067155f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.695833541f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.999925219f + 0x1p-8f));
    return _mm512_scalef_ps(p, x);
}

/* Scores of a row of the unit to probabilities; `most` takes in their exponents. Sums are of the
 * rounded probabilities: see bf16_softmax. */
INLINE void flash_row(struct flash_state *state, const struct flash_unit *unit, int32_t at,
                      const int masked, int32_t r, __m512 *most)
{
    const struct flash_args *args = state->args;
    const float *x = state->scores[at & 1] + r * UNIT;
    const __m512i upper = _mm512_set1_epi32((int32_t)0xffff0000u);
    const __m512 factor = _mm512_set1_ps(args->factor);
    const __m512 minus = _mm512_set1_ps(state->minus[r]);
    __m512 y0 = _mm512_fmadd_ps(_mm512_load_ps(x), factor, minus);
    __m512 y1 = _mm512_fmadd_ps(_mm512_load_ps(x + 16), factor, minus);
    if (masked) {
        const __m512 none = _mm512_set1_ps(-INFINITY);
        uint32_t seen = flash_visible(args, args->blocks[unit->block].row + r, unit->step * UNIT);
        y0 = _mm512_mask_mov_ps(none, (__mmask16)seen, y0);
        y1 = _mm512_mask_mov_ps(none, (__mmask16)(seen >> 16), y1);
    }
    *most = _mm512_max_ps(y0, *most); /* a NaN leaves it */
    *most = _mm512_max_ps(y1, *most);
    __m512i p0 = _mm512_castps_si512(flash_exp2(y0));
    __m512i p1 = _mm512_castps_si512(flash_exp2(y1));
    __m512i pairs = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(p0, 16), p1);
    _mm512_store_si512(state->p[unit->block & 1][unit->step] + r * UNIT, pairs);
    __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(_mm512_and_si512(p0, upper)),
                               _mm512_castsi512_ps(_mm512_and_si512(p1, upper)));
    _mm512_store_ps(state->lanes[r], _mm512_add_ps(sum, _mm512_load_ps(state->lanes[r])));
}

#define ACROSS_16(name, combine)                                                                   \
    /* lane i of the result combines all lanes of r[i] */                                          \
    INLINE __m512 name(const __m512 *r)                                                            \
    {                                                                                              \
        __m512 four[4];                                                                            \
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)                                        \
        {                                                                                          \
            const __m512 *q = r + 4 * i;                                                           \
            __m512d ab = _mm512_castps_pd(                                                         \
                combine(_mm512_unpacklo_ps(q[0], q[1]), _mm512_unpackhi_ps(q[0], q[1])));          \
            __m512d cd = _mm512_castps_pd(                                                         \
                combine(_mm512_unpacklo_ps(q[2], q[3]), _mm512_unpackhi_ps(q[2], q[3])));          \
            four[i] = combine(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),                        \
                              _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));                       \
        }                                                                                          \
        __m512 low = combine(_mm512_shuffle_f32x4(four[0], four[1], 0x88),                         \
                             _mm512_shuffle_f32x4(four[0], four[1], 0xdd));                        \
        __m512 high = combine(_mm512_shuffle_f32x4(four[2], four[3], 0x88),                        \
                              _mm512_shuffle_f32x4(four[2], four[3], 0xdd));                       \
        return combine(_mm512_shuffle_f32x4(low, high, 0x88),                                      \
                       _mm512_shuffle_f32x4(low, high, 0xdd));                                     \
    }
ACROSS_16(add_across, _mm512_add_ps)
ACROSS_16(max_across, _mm512_max_ps)

/* What a row has summed and its probabilities of this tile, under a new reference. */
static void flash_rescale(struct flash_state *state, const struct flash_unit *unit, int32_t r,
                          float factor)
{
    const struct flash_args *args = state->args;
    const struct flash_block *block = &args->blocks[unit->block];
    const __m512i upper = _mm512_set1_epi32((int32_t)0xffff0000u);
    const __m512 by = _mm512_set1_ps(factor);
    float *out = args->accumulator + (int64_t)(block->row + r) * args->width;
    for (int32_t d = 0; d < args->width && !block->fresh; d += 16) {
        _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_loadu_ps(out + d), by));
    }
    args->sum[block->row + r] *= factor;
    __m512 lanes = _mm512_setzero_ps();
    for (int32_t step = block->begin / UNIT; step < unit->step; step++) {
        uint16_t *p = state->p[unit->block & 1][step] + r * UNIT;
        __m512i pairs = _mm512_load_si512(p);
        __m512 p0 = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), by);
        __m512 p1 = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(pairs, upper)), by);
        __m512i low = (__m512i)_mm512_cvtne2ps_pbh(p0, p0);
        __m512i high = (__m512i)_mm512_cvtne2ps_pbh(p1, p1);
        __m512i first;
        __m512i last;
        interleave_pairs(low, high, &first, &last);
        _mm512_store_si512(p, first);
        p0 = _mm512_castsi512_ps(_mm512_slli_epi32(first, 16));
        p1 = _mm512_castsi512_ps(_mm512_and_si512(first, upper));
        lanes = _mm512_add_ps(_mm512_add_ps(p0, p1), lanes);
    }
    _mm512_store_ps(state->lanes[r], lanes);
}

/* New references for the rows whose scores of the unit pass theirs by the threshold: their bits. */
static uint32_t flash_raise(struct flash_state *state, const struct flash_unit *unit, int32_t at)
{
    const struct flash_args *args = state->args;
    const struct flash_block *block = &args->blocks[unit->block];
    const __m512 none = _mm512_set1_ps(-INFINITY);
    uint32_t raised = 0;
    for (int32_t half = 0; half < UNIT; half += 16) {
        __m512 most[16];
        for (int32_t r = 0; r < 16; r++) {
            const float *x = state->scores[at & 1] + (half + r) * UNIT;
            uint32_t seen = 0xffffffffu;
            if (block->masked) {
                seen = flash_visible(args, block->row + half + r, unit->step * UNIT);
            }
            /* a NaN counts as nothing */
            __m512 left = _mm512_max_ps(_mm512_mask_loadu_ps(none, (__mmask16)seen, x), none);
            most[r] =
                _mm512_max_ps(_mm512_mask_loadu_ps(none, (__mmask16)(seen >> 16), x + 16), left);
        }
        __m512 best = _mm512_mul_ps(max_across(most), _mm512_set1_ps(args->factor));
        float *reference = args->reference + block->row + half;
        __m512 old = _mm512_loadu_ps(reference);
        __mmask16 passed = _mm512_cmp_ps_mask(
            best, _mm512_add_ps(old, _mm512_set1_ps(RESCALE_THRESHOLD)), _CMP_GT_OQ);
        _mm512_mask_storeu_ps(reference, passed, best);
        _mm512_mask_storeu_ps(state->minus + half, passed,
                              _mm512_sub_ps(_mm512_setzero_ps(), best));
        raised |= (uint32_t)passed << half;
        float before[16];
        _mm512_storeu_ps(before, old);
        uint32_t again = passed;
        if (block->fresh && unit->step == block->begin / UNIT) { /* nothing is summed yet */
            again = 0;
        }
        for (; again != 0; again &= again - 1) {
            int32_t r = __builtin_ctz(again);
            flash_rescale(state, unit, half + r, exp2f(before[r] - reference[r]));
        }
    }
    return raised;
}

static void flash_begin_block(struct flash_state *state, const struct flash_block *block)
{
    const float *reference = state->args->reference + block->row;
    for (int32_t r = 0; r < UNIT; r++) {
        _mm512_store_ps(state->lanes[r], _mm512_setzero_ps());
    }
    for (int32_t r = 0; r < UNIT; r += 16) { /* none yet: whatever comes passes it */
        __m512 old = _mm512_loadu_ps(reference + r);
        __mmask16 none = _mm512_cmp_ps_mask(old, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
        __m512 minus = _mm512_sub_ps(_mm512_setzero_ps(), old);
        _mm512_store_ps(state->minus + r, _mm512_mask_mov_ps(minus, none, _mm512_set1_ps(3e38f)));
    }
}

static void flash_end_block(struct flash_state *state, const struct flash_block *block)
{
    float *sum = state->args->sum + block->row;
    for (int32_t r = 0; r < UNIT; r += 16) {
        __m512 rows[16];
#pragma GCC unroll 16
        for (int32_t i = 0; i < 16; i++) {
            rows[i] = _mm512_load_ps(state->lanes[r + i]);
        }
        _mm512_storeu_ps(sum + r, _mm512_add_ps(_mm512_loadu_ps(sum + r), add_across(rows)));
    }
}

/* Rows done up to here when `done` of `steps` products are. */
#define ROWS_DUE(done)                                                                             \
    for (int32_t due = (done)*UNIT / steps; row < due; row++) {                                    \
        flash_row(state, unit, at, masked, row, &most);                                            \
    }

/* Softmax of `unit`, the at-th of the tile, beside the scores of `next` and columns first .. last-1
 * (of 32) of the output of the block before; either may be missing. */
INLINE void flash_unit(struct flash_state *state, const struct flash_unit *unit, int32_t at,
                       const struct flash_unit *next, int32_t first, int32_t last, const int masked)
{
    const struct flash_args *args = state->args;
    const struct flash_block *block = &args->blocks[unit->block];
    const struct flash_block *before = block - 1;
    int32_t depth_steps = args->depth / UNIT;
    int32_t key_begin = first < last ? before->begin / UNIT : 0;
    int32_t key_end = first < last ? before->end / UNIT : 0;
    int32_t steps = (next != NULL ? depth_steps : 0) + (last - first) * (key_end - key_begin);
    int32_t row = 0;
    int32_t done = 0;
    __m512 most = _mm512_set1_ps(-INFINITY);
    if (next != NULL) {
        const uint16_t *q =
            (const uint16_t *)args->q + (int64_t)args->blocks[next->block].row * args->depth;
        const uint16_t *keys =
            (const uint16_t *)args->keys + (int64_t)next->step * args->depth * UNIT;
        flash_zero();
        for (int32_t d = 0; d < depth_steps; d++) {
            flash_multiply(q + d * UNIT, args->depth, keys + d * 2 * TILE_ELEMENTS);
            done++;
            ROWS_DUE(done)
        }
        flash_store(state->scores[(at + 1) & 1], UNIT);
    }
    for (int32_t j = first; j < last; j++) {
        float *out = args->accumulator + (int64_t)before->row * args->width + j * UNIT;
        const uint16_t *values = (const uint16_t *)args->values + (int64_t)j * TILE_KEYS * UNIT;
        if (before->fresh) {
            flash_zero();
        } else {
            flash_load(out, args->width);
        }
        for (int32_t k = key_begin; k < key_end; k++) {
            flash_multiply(state->p[(unit->block - 1) & 1][k], UNIT,
                           values + k * 2 * TILE_ELEMENTS);
            done++;
            ROWS_DUE(done)
        }
        flash_store(out, args->width);
    }
    for (; row < UNIT; row++) {
        flash_row(state, unit, at, masked, row, &most);
    }
    if (_mm512_cmp_ps_mask(most, _mm512_set1_ps(RESCALE_THRESHOLD), _CMP_GT_OQ) != 0) {
        uint32_t raised = flash_raise(state, unit, at);
        for (; raised != 0; raised &= raised - 1) {
            flash_row(state, unit, at, block->masked, __builtin_ctz(raised), &most);
        }
    }
}
#undef ROWS_DUE

/* Scores of a tile's first unit, and the output of its last block. */
static void flash_first(struct flash_state *state)
{
    const struct flash_args *args = state->args;
    const struct flash_block *block = &args->blocks[0];
    const uint16_t *q = (const uint16_t *)args->q + (int64_t)block->row * args->depth;
    const uint16_t *keys = (const uint16_t *)args->keys + (int64_t)block->begin * args->depth;
    flash_zero();
    for (int32_t d = 0; d < args->depth / UNIT; d++) {
        flash_multiply(q + d * UNIT, args->depth, keys + d * 2 * TILE_ELEMENTS);
    }
    flash_store(state->scores[0], UNIT);
}

static void flash_last(struct flash_state *state)
{
    const struct flash_args *args = state->args;
    int32_t index = args->num_blocks - 1;
    const struct flash_block *block = &args->blocks[index];
    for (int32_t j = 0; j < args->width / UNIT; j++) {
        float *out = args->accumulator + (int64_t)block->row * args->width + j * UNIT;
        const uint16_t *values = (const uint16_t *)args->values + (int64_t)j * TILE_KEYS * UNIT;
        if (block->fresh) {
            flash_zero();
        } else {
            flash_load(out, args->width);
        }
        for (int32_t k = block->begin / UNIT; k < block->end / UNIT; k++) {
            flash_multiply(state->p[index & 1][k], UNIT, values + k * 2 * TILE_ELEMENTS);
        }
        flash_store(out, args->width);
    }
}

static void amx_flash_attend(const struct flash_args *args)
{
    struct flash_state state;
    state.args = args;
    int32_t columns = args->width / UNIT;
    int32_t at = 0;
    flash_first(&state);
    for (int32_t b = 0; b < args->num_blocks; b++) {
        const struct flash_block *block = &args->blocks[b];
        int32_t begin = block->begin / UNIT;
        int32_t units = block->end / UNIT - begin;
        flash_begin_block(&state, block);
        for (int32_t i = 0; i < units; i++, at++) {
            struct flash_unit unit = {b, begin + i};
            struct flash_unit next = {b, begin + i + 1};
            if (i + 1 == units && b + 1 < args->num_blocks) {
                next = (struct flash_unit){b + 1, args->blocks[b + 1].begin / UNIT};
            }
            const struct flash_unit *follows =
                i + 1 < units || b + 1 < args->num_blocks ? &next : NULL;
            int32_t first = b > 0 ? columns * i / units : 0;
            int32_t last = b > 0 ? columns * (i + 1) / units : 0;
            if (block->fresh && i == 0) {
                flash_raise(&state, &unit, at);
            }
            if (block->masked) {
                flash_unit(&state, &unit, at, follows, first, last, 1);
            } else {
                flash_unit(&state, &unit, at, follows, first, last, 0);
            }
        }
        flash_end_block(&state, block);
    }
    flash_last(&state);
}

static void amx_flash_pack_keys(void *packed, const void *const *rows, int32_t n, int32_t columns,
                                int32_t depth)
{
    float *out = packed;
    for (int32_t j = 0; j < columns; j += UNIT) {
        for (int32_t d = 0; d < depth; d += UNIT) {
            for (int32_t half = j; half < j + UNIT; half += 16, out += 256) {
                __m512 block[16];
#pragma GCC unroll 16
                for (int32_t i = 0; i < 16; i++) {
                    block[i] = half + i < n ? _mm512_loadu_ps((const uint16_t *)rows[half + i] + d)
                                            : _mm512_setzero_ps();
                }
                vf_transpose(block);
#pragma GCC unroll 16
                for (int32_t i = 0; i < 16; i++) {
                    _mm512_storeu_ps(out + 16 * i, block[i]);
                }
            }
        }
    }
}

static int amx_flash_pack_values(void *packed, const void *const *rows, int32_t n, int32_t n_padded,
                                 int32_t width)
{
    uint16_t *out = packed;
    __mmask32 spoilt = 0;
    for (int32_t k = 0; k < n_padded; k += UNIT) {
        for (int32_t i = k; i < k + 16; i++) {
            uint16_t *pair = out + (int64_t)k / UNIT * 2 * TILE_ELEMENTS + (i - k) * UNIT;
            for (int32_t d = 0; d < width; d += UNIT) {
                __m512i even = _mm512_setzero_si512();
                __m512i odd = _mm512_setzero_si512();
                if (i < n) {
                    even = _mm512_loadu_si512((const uint16_t *)rows[i] + d);
                }
                if (i + 16 < n) {
                    odd = _mm512_loadu_si512((const uint16_t *)rows[i + 16] + d);
                }
                spoilt |= bf16_not_finite(even) | bf16_not_finite(odd);
                __m512i first;
                __m512i last;
                interleave_pairs(even, odd, &first, &last);
                _mm512_storeu_si512(pair + (int64_t)d * TILE_KEYS, first);
                _mm512_storeu_si512(pair + (int64_t)d * TILE_KEYS + TILE_ELEMENTS, last);
            }
        }
    }
    return spoilt != 0;
}

static const struct flash_engine amx_flash = {
    .pack_keys = amx_flash_pack_keys,
    .pack_values = amx_flash_pack_values,
    .attend = amx_flash_attend,
};

#endif
