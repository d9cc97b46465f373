/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles of keys for all rows of an item on AMX, 32 rows by 32 keys (a unit) at a time. While vector
 * instructions turn the scores of a unit into probabilities, the tile unit computes the scores of
 * the unit after the next. The values follow once a tile, since acc_o goes from L1 to L2 and back:
 * a tile store there costs three times as much as a load.
 *
 * 32 x 128 at head size 128: 128 tdpbf16ps (2048 cycles), under which vectors have a port and a
 * half, 256 vectors of 9 instructions (1150 on two ports), 128 tile loads and 32 stores (2600).
 *
 * row_max is raised afterwards, where an exponent passes the threshold. Probabilities of keys 16
 * apart are pairs (amx_pack.h): a masked shuffle makes them from two vectors. */
#ifndef CPU_SIMD_AMX_FLASH_H
#define CPU_SIMD_AMX_FLASH_H

#include "amx_chain.h"

enum {
    UNIT_STEPS = FLASH_KEYS / UNIT, /* units of a tile */
    FLASH_GROUP = 2                 /* rows whose instructions are interleaved */
};

/* row_max is raised where an exponent passes this. Probabilities of 2^16 lose nothing, in bf16 or
 * in a sum, and raising is expensive: acc_o is rescaled and the unit's softmax repeated. The bits
 * are those of 2^16 as a bf16. */
#define FLASH_THRESHOLD 16.0f
#define FLASH_THRESHOLD_BITS 0x4780

struct flash_state {
    _Alignas(64) float scores[3][FLASH_ROWS * UNIT]; /* this unit's and those after it */
    _Alignas(64) uint16_t p[UNIT_STEPS][FLASH_ROWS * UNIT];
    _Alignas(64) float lanes[2][FLASH_ROWS][16]; /* row_sum of this block by lane, alternating:
                                                    before this unit, and including it */
    _Alignas(64) float minus[FLASH_ROWS];        /* -row_max */
    const struct flash_args *args;
    const struct flash_block *block;
    int32_t row;     /* first of the block */
    int32_t turn;    /* 0 or 1: which of lanes are from before this unit */
    int32_t buffer;  /* has this unit's scores */
    int32_t buffers; /* 2 or 3 of scores are in use */
    int32_t held;    /* block whose queries are in registers 4 .. 7, or -1 */
    struct chain chain;
};

/* Bits of the unit's columns that a row sees. */
INLINE uint32_t flash_visible(const struct flash_state *state, int32_t r, int32_t step)
{
    int32_t low = state->args->low[state->row + r] - step * UNIT;
    int32_t high = state->args->high[state->row + r] - step * UNIT;
    uint32_t from = low <= 0 ? 0xffffffffu : low >= UNIT ? 0 : 0xffffffffu << low;
    uint32_t to = high <= 0 ? 0 : high >= UNIT ? 0xffffffffu : ~(0xffffffffu << high);
    return from & to;
}

/* Turns scores of rows r .. r+FLASH_GROUP-1 of a unit into probabilities; `most` collects their
 * largest bits. Sums are of the probabilities before rounding. Instructions of all rows are
 * interleaved: while tiles multiply, vectors have one port, and instructions that wait would fill
 * its queue. */
INLINE void flash_rows(struct flash_state *state, int32_t step, const int masked, int32_t r,
                       __m512i *most)
{
    enum { VECTORS = 2 * FLASH_GROUP };
    const struct flash_args *args = state->args;
    const float *scores = state->scores[state->buffer] + r * UNIT;
    uint16_t *out = state->p[step] + r * UNIT;
    const __m512i half = _mm512_set1_epi32(0x8000); /* truncation to bf16 then rounds to nearest */
    const __m512i upper = _mm512_set4_epi32(0x0f0e, 0x0b0a, 0x0706, 0x0302);
    const __m512 factor = _mm512_set1_ps(args->softmax_scale_log2);
    __m512 x[VECTORS];
    __m512 f[VECTORS];
    __m512 p[VECTORS];
#define EACH _Pragma("GCC unroll 16") for (int i = 0; i < VECTORS; i++)
    EACH x[i] = _mm512_fmadd_ps(_mm512_load_ps(scores + 16 * i), factor,
                                _mm512_set1_ps(state->minus[r + i / 2]));
    if (masked) {
        const __m512 none = _mm512_set1_ps(-INFINITY);
#pragma GCC unroll 16
        for (int i = 0; i < VECTORS; i += 2) {
            uint32_t seen = flash_visible(state, r + i / 2, step);
            x[i] = _mm512_mask_mov_ps(none, (__mmask16)seen, x[i]);
            x[i + 1] = _mm512_mask_mov_ps(none, (__mmask16)(seen >> 16), x[i + 1]);
        }
    }
    EACH f[i] = _mm512_reduce_ps(x[i], 0x09);
    EACH p[i] = _mm512_fmadd_ps(_mm512_set1_ps(0.0780245227f), f[i], _mm512_set1_ps(0.226067155f));
    EACH p[i] = _mm512_fmadd_ps(p[i], f[i], _mm512_set1_ps(0.695833541f));
    EACH p[i] = _mm512_fmadd_ps(p[i], f[i], _mm512_set1_ps(0.999925219f));
    EACH p[i] = _mm512_scalef_ps(p[i], x[i]);
#undef EACH
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; i += 2) {
        __m512i p0 = _mm512_add_epi32(_mm512_castps_si512(p[i]), half);
        __m512i p1 = _mm512_add_epi32(_mm512_castps_si512(p[i + 1]), half);
        __m512i pairs = _mm512_mask_shuffle_epi8(p1, 0x3333333333333333u, p0, upper);
        *most = _mm512_max_epu16(*most, pairs); /* a NaN's bits are larger than all others */
        _mm512_store_si512(out + 16 * i, pairs);
        __m512 sum = _mm512_add_ps(p[i], p[i + 1]);
        const float *before = state->lanes[state->turn][r + i / 2];
        _mm512_store_ps(state->lanes[1 - state->turn][r + i / 2],
                        _mm512_add_ps(sum, _mm512_load_ps(before)));
    }
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

/* Rescales a row's acc_o and row_sum from before this unit, and its probabilities of this tile, to
 * a new row_max. */
static void flash_rescale_o(struct flash_state *state, int32_t step, int32_t r, float factor)
{
    const struct flash_args *args = state->args;
    const struct flash_block *block = state->block;
    const __m512i upper = _mm512_set1_epi32((int32_t)0xffff0000u);
    const __m512 by = _mm512_set1_ps(factor);
    float *out = args->acc_o + (int64_t)(state->row + r) * args->width;
    for (int32_t d = 0; d < args->width && !block->first_tile; d += 16) {
        _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_loadu_ps(out + d), by));
    }
    args->row_sum[state->row + r] *= factor;
    float *lanes = state->lanes[state->turn][r];
    _mm512_store_ps(lanes, _mm512_mul_ps(_mm512_load_ps(lanes), by));
    for (int32_t before = block->begin / UNIT; before < step; before++) {
        uint16_t *p = state->p[before] + r * UNIT;
        __m512i pairs = _mm512_load_si512(p);
        __m512 p0 = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), by);
        __m512 p1 = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(pairs, upper)), by);
        __m512i even = (__m512i)_mm512_cvtne2ps_pbh(p0, p0);
        __m512i odd = (__m512i)_mm512_cvtne2ps_pbh(p1, p1);
        __m512i unused;
        interleave_pairs(even, odd, &pairs, &unused);
        _mm512_store_si512(p, pairs);
    }
}

/* Raises row_max of the rows whose scores of the unit pass it by the threshold; returns their bits.
 */
static uint32_t flash_raise_row_max(struct flash_state *state, int32_t step)
{
    const struct flash_args *args = state->args;
    const struct flash_block *block = state->block;
    const __m512 none = _mm512_set1_ps(-INFINITY);
    int first = block->first_tile && step == block->begin / UNIT; /* acc_o is still empty */
    uint32_t raised = 0;
    for (int32_t part = 0; part < FLASH_ROWS; part += 16) {
        __m512 most[16];
        for (int32_t r = 0; r < 16; r++) {
            const float *x = state->scores[state->buffer] + (part + r) * UNIT;
            uint32_t seen = 0xffffffffu;
            if (block->masked) {
                seen = flash_visible(state, part + r, step);
            }
            /* a NaN does not raise row_max */
            most[r] = _mm512_max_ps(_mm512_mask_loadu_ps(none, (__mmask16)seen, x), none);
            most[r] =
                _mm512_max_ps(_mm512_mask_loadu_ps(none, (__mmask16)(seen >> 16), x + 16), most[r]);
        }
        __m512 best = _mm512_mul_ps(max_across(most), _mm512_set1_ps(args->softmax_scale_log2));
        float *row_max = args->row_max + state->row + part;
        __m512 old = _mm512_loadu_ps(row_max);
        __mmask16 passed = _mm512_cmp_ps_mask(
            best, _mm512_add_ps(old, _mm512_set1_ps(FLASH_THRESHOLD)), _CMP_GT_OQ);
        _mm512_mask_storeu_ps(row_max, passed, best);
        _mm512_mask_storeu_ps(state->minus + part, passed,
                              _mm512_sub_ps(_mm512_setzero_ps(), best));
        raised |= (uint32_t)passed << part;
        float before[16];
        _mm512_storeu_ps(before, old);
        for (uint32_t again = first ? 0 : passed; again != 0; again &= again - 1) {
            int32_t r = __builtin_ctz(again);
            flash_rescale_o(state, step, part + r, exp2f(before[r] - row_max[r]));
        }
    }
    return raised;
}

static void flash_begin_block(struct flash_state *state)
{
    const float *row_max = state->args->row_max + state->row;
    for (int32_t r = 0; r < FLASH_ROWS; r++) {
        _mm512_store_ps(state->lanes[state->turn][r], _mm512_setzero_ps());
    }
    for (int32_t r = 0; r < FLASH_ROWS; r += 16) { /* no row_max yet: every score passes it */
        __m512 old = _mm512_loadu_ps(row_max + r);
        __mmask16 none = _mm512_cmp_ps_mask(old, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
        __m512 minus = _mm512_sub_ps(_mm512_setzero_ps(), old);
        _mm512_store_ps(state->minus + r, _mm512_mask_mov_ps(minus, none, _mm512_set1_ps(3e38f)));
    }
}

static void flash_end_block(struct flash_state *state)
{
    float *sum = state->args->row_sum + state->row;
    for (int32_t r = 0; r < FLASH_ROWS; r += 16) {
        __m512 rows[16];
#pragma GCC unroll 16
        for (int32_t i = 0; i < 16; i++) {
            rows[i] = _mm512_load_ps(state->lanes[1 - state->turn][r + i]);
        }
        _mm512_storeu_ps(sum + r, _mm512_add_ps(_mm512_loadu_ps(sum + r), add_across(rows)));
    }
}

/* Probabilities of all units times values. */
INLINE void flash_values(struct flash_state *state)
{
    const struct flash_args *args = state->args;
    const struct flash_block *block = state->block;
    if (state->chain.narrow) {
        chain_end(&state->chain);
    }
    state->held = -1;
    for (int32_t j = 0; j < args->width / UNIT; j++) {
        const uint16_t *values = (const uint16_t *)args->values + (int64_t)j * FLASH_KEYS * UNIT;
        float *out = args->acc_o + (int64_t)state->row * args->width + j * UNIT;
        int32_t k = block->begin / UNIT;
        chain_begin(&state->chain, state->p[k], UNIT, values + k * 2 * TILE_ELEMENTS,
                    block->first_tile ? NULL : out, out, args->width);
        for (k++; k < block->end / UNIT; k++) {
            chain_continue(state->p[k], UNIT, values + k * 2 * TILE_ELEMENTS);
        }
    }
}

/* Repeats the softmax for rows of the unit that passed their row_max. The other rows of their
 * groups get the same result again. */
static void flash_repeat_softmax(struct flash_state *state, int32_t step)
{
    uint32_t raised = flash_raise_row_max(state, step);
    __m512i most = _mm512_setzero_si512();
    for (int32_t r = 0; r < FLASH_ROWS; r += FLASH_GROUP) {
        if ((raised >> r & ((1u << FLASH_GROUP) - 1)) != 0) {
            flash_rows(state, step, state->block->masked, r, &most);
        }
    }
}

/* A unit: 32 columns of a tile for a block. */
struct flash_unit {
    int32_t block;
    int32_t step; /* column / 32 */
};

/* Advances to the next unit; returns 0 after the last one. */
static int flash_next(const struct flash_args *args, struct flash_unit *at)
{
    if (at->block >= 0 && ++at->step * UNIT < args->blocks[at->block].end) {
        return 1;
    }
    while (++at->block < args->num_blocks) {
        const struct flash_block *block = &args->blocks[at->block];
        if (block->begin < block->end) {
            at->step = block->begin / UNIT;
            return 1;
        }
    }
    return 0;
}

/* Rows of a unit's softmax that are due before row `end`. */
INLINE void flash_rows_to(struct flash_state *state, int32_t step, const int masked, int32_t *row,
                          int32_t end, __m512i *most)
{
    for (; *row + FLASH_GROUP <= end; *row += FLASH_GROUP) {
        flash_rows(state, step, masked, *row, most);
    }
}

/* Scores of head size 64: a block's queries stay in registers 4 .. 7, so that a tile of keys is
 * loaded for two products. Sums are those of 16 keys at a time, so that a unit has two chains. */
enum { HELD_DEPTH = 64, HELD_OPERATIONS = 12 };

static void flash_hold_queries(struct flash_state *state, int32_t block)
{
    const uint16_t *q = (const uint16_t *)state->args->q + (int64_t)block * FLASH_ROWS * HELD_DEPTH;
    if (!state->chain.narrow) {
        chain_end(&state->chain);
    }
    tiles_and_memory();
    _tile_loadd(4, q, HELD_DEPTH * 2);
    _tile_loadd(5, q + UNIT, HELD_DEPTH * 2);
    _tile_loadd(6, q + 16 * HELD_DEPTH, HELD_DEPTH * 2);
    _tile_loadd(7, q + 16 * HELD_DEPTH + UNIT, HELD_DEPTH * 2);
    state->held = block;
}

#define HELD_TURN(i)                                                                               \
    if (chain->to != NULL) {                                                                       \
        _tile_stored(i, chain->to + (i)*16 * UNIT, UNIT * 4);                                      \
    }                                                                                              \
    _tile_zero(i);

/* Operation i of a unit's, whose scores go to `scores`. */
INLINE void flash_held_operation(const int i, const uint16_t *keys, struct chain *chain,
                                 float *scores)
{
    const int half = i / (HELD_OPERATIONS / 2);
    tiles_and_memory();
    switch (i % (HELD_OPERATIONS / 2)) {
    case 0:
        _tile_stream_loadd(2, keys + half * TILE_ELEMENTS, 64);
        tile_gap();
        break;
    case 1:
        HELD_TURN(0)
        _tile_dpbf16ps(0, 4, 2);
        break;
    case 2:
        HELD_TURN(1)
        _tile_dpbf16ps(1, 6, 2);
        break;
    case 3:
        _tile_stream_loadd(3, keys + (2 + half) * TILE_ELEMENTS, 64);
        tile_gap();
        break;
    case 4:
        _tile_dpbf16ps(0, 5, 3);
        break;
    default:
        _tile_dpbf16ps(1, 7, 3);
        *chain = (struct chain){scores + 16 * half, UNIT, true};
    }
    tiles_and_memory();
}
#undef HELD_TURN

/* Softmax of a unit, a few rows after each load and product of the scores of `later`, the unit
 * after the next. The first of these products store the scores of the next unit, whose softmax
 * comes a unit later: nothing waits for them. */
INLINE void flash_softmax_and_later_scores(struct flash_state *state, int32_t step,
                                           const struct flash_unit *later, const int masked)
{
    const struct flash_args *args = state->args;
    const int64_t depth = args->depth;
    __m512i most = _mm512_setzero_si512();
    int32_t row = 0;
    const uint16_t *q = NULL, *keys = NULL;
    float *scores = state->scores[(state->buffer + 2) % state->buffers];
    if (later != NULL) {
        q = (const uint16_t *)args->q + later->block * FLASH_ROWS * depth;
        keys = (const uint16_t *)args->keys + later->step * depth * UNIT;
    }
    if (later != NULL && depth == HELD_DEPTH) {
        if (state->held != later->block) {
            flash_hold_queries(state, later->block);
        }
#pragma GCC unroll 12
        for (int i = 0; i < HELD_OPERATIONS; i++) {
            flash_held_operation(i, keys, &state->chain, scores);
            flash_rows_to(state, step, masked, &row, (i + 1) * FLASH_ROWS / HELD_OPERATIONS, &most);
        }
    } else if (later != NULL) {
        const int32_t operations = CHAIN_OPERATIONS * (int32_t)(depth / UNIT);
#pragma GCC unroll 8
        for (int i = 0; i < CHAIN_OPERATIONS; i++) {
            chain_operation(i, q, depth, keys, 1, &state->chain, NULL, 0);
            flash_rows_to(state, step, masked, &row, (i + 1) * FLASH_ROWS / operations, &most);
        }
        state->chain = (struct chain){scores, UNIT, false};
        for (int32_t at = CHAIN_OPERATIONS; at < operations; at += CHAIN_OPERATIONS) {
            q += UNIT;
            keys += 2 * TILE_ELEMENTS;
#pragma GCC unroll 8
            for (int i = 0; i < CHAIN_OPERATIONS; i++) {
                chain_operation(i, q, depth, keys, 0, NULL, NULL, 0);
                flash_rows_to(state, step, masked, &row, (at + i + 1) * FLASH_ROWS / operations,
                              &most);
            }
        }
    }
    flash_rows_to(state, step, masked, &row, FLASH_ROWS, &most);
    if (_mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(FLASH_THRESHOLD_BITS)) != 0) {
        flash_repeat_softmax(state, step);
    }
}

/* Scores of one of the first two units, without a softmax to interleave. */
static void flash_first_scores(struct flash_state *state, const struct flash_unit *unit,
                               float *scores)
{
    const struct flash_args *args = state->args;
    const uint16_t *q = (const uint16_t *)args->q + (int64_t)unit->block * FLASH_ROWS * args->depth;
    const uint16_t *keys = (const uint16_t *)args->keys + (int64_t)unit->step * args->depth * UNIT;
    chain_begin(&state->chain, q, args->depth, keys, NULL, scores, UNIT);
    for (int32_t d = 1; d < args->depth / UNIT; d++) {
        chain_continue(q + d * UNIT, args->depth, keys + d * 2 * TILE_ELEMENTS);
    }
}

static void amx_flash_attend(const struct flash_args *args)
{
    struct flash_state state;
    struct flash_unit unit = {.block = -1};
    state.args = args;
    state.chain = (struct chain){NULL, 0, false};
    state.turn = 0;
    state.buffer = 0;
    /* held queries: the first half of a unit's scores is stored while the second is computed */
    state.buffers = args->depth == HELD_DEPTH ? 3 : 2;
    state.held = -1;
    if (!flash_next(args, &unit)) {
        return;
    }
    flash_first_scores(&state, &unit, state.scores[0]);
    struct flash_unit next = unit;
    int more = flash_next(args, &next);
    if (more) {
        flash_first_scores(&state, &next, state.scores[1]);
    } else {
        chain_end(&state.chain);
    }
    for (;; state.turn = 1 - state.turn, state.buffer = (state.buffer + 1) % state.buffers) {
        struct flash_unit later = next;
        int more_later = more && flash_next(args, &later);
        const struct flash_unit *scores = more_later ? &later : NULL;
        state.block = &args->blocks[unit.block];
        state.row = unit.block * FLASH_ROWS;
        if (unit.step == state.block->begin / UNIT) {
            flash_begin_block(&state);
            if (state.block->first_tile) {
                flash_raise_row_max(&state, unit.step);
            }
        }
        if (state.block->masked) {
            flash_softmax_and_later_scores(&state, unit.step, scores, 1);
        } else {
            flash_softmax_and_later_scores(&state, unit.step, scores, 0);
        }
        if ((unit.step + 1) * UNIT == state.block->end) {
            flash_values(&state);
            flash_end_block(&state);
        }
        if (!more_later) {
            chain_end(&state.chain);
        }
        if (!more) {
            return;
        }
        unit = next;
        next = later;
        more = more_later;
    }
}

static const struct flash_kernels amx_flash = {
    .pack_keys = amx_flash_pack_keys,
    .pack_values = amx_flash_pack_values,
    .attend = amx_flash_attend,
};

#endif
