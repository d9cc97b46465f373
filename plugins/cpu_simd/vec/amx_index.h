/* SPDX-License-Identifier: Apache-2.0 */
/* An indexer's scores on AMX: products and sums over heads, 32 keys by 32 query rows (a unit) at a
 * time. Keys are the left operand, where they lie, and query rows the right one, packed once a
 * chunk. While the tile unit multiplies, vectors add the unit before the last to its sums, which
 * are kept by lane: a lane is a head of 16, and lanes are added once a list and 32 keys.
 *
 * 32 x 32 at D 128: 16 tdpbf16ps (256 cycles), 16 tile loads (128), 4 tile stores, and 64 vectors
 * of two instructions, with 90 more to add the lanes of a list (80 to 110 on two ports). */
#ifndef CPU_SIMD_AMX_INDEX_H
#define CPU_SIMD_AMX_INDEX_H

#include "amx_decode.h"
#include "amx_flash.h"

struct index_state {
    _Alignas(64) float scores[2][UNIT * UNIT]; /* [keys][rows] of the last two units, alternating */
    _Alignas(64) float lanes[UNIT][16];
    const struct index_args *args;
    struct chain chain;
    struct lines lines;
};

struct index_keys {
    const uint16_t *at;
    int64_t stride;
};

struct index_unit {
    int32_t key, list, block; /* block of 32 query rows of the list */
};

/* Rows of 32 keys: copied where they are not equally far apart, or fewer, with the last one
 * repeated. */
static struct index_keys index_find_keys(const struct index_args *args, int32_t first)
{
    const char *const *rows = args->keys.key_rows + first;
    const int32_t n = args->keys.keys - first < UNIT ? args->keys.keys - first : UNIT;
    const int64_t stride = n == UNIT ? rows[1] - rows[0] : 1; /* odd: copied */
    const int64_t bytes = args->keys.depth * (int64_t)sizeof(uint16_t);
    bool equal = stride % 2 == 0;
    for (int32_t j = 2; j < n; j++) {
        equal = equal && rows[j] - rows[j - 1] == stride;
    }
    if (equal) {
        return (struct index_keys){(const uint16_t *)rows[0], stride / 2};
    }
    for (int32_t j = 0; j < UNIT; j++) {
        char *to = args->staged + (first + j) * bytes;
        const char *from = rows[j < n ? j : n - 1];
        if (to != from) {
            memcpy(to, from, (size_t)bytes);
        }
    }
    return (struct index_keys){(const uint16_t *)(args->staged + first * bytes), bytes / 2};
}

/* Adds a key's scores of a unit to its lanes; `scaled`, a constant: a factor may be 0, negative or
 * not finite, so it is applied before the activation. */
INLINE void index_add_key(struct index_state *state, const struct index_unit *unit, int32_t j,
                          const float *scores, const int scaled)
{
    const struct index_args *args = state->args;
    const float *weights = args->weights + (int64_t)unit->list * args->heads + unit->block * UNIT;
    const __m512 least = _mm512_set1_ps(args->relu ? 0.0f : -INFINITY);
    __m512 x0 = _mm512_load_ps(scores + j * UNIT);
    __m512 x1 = _mm512_load_ps(scores + j * UNIT + 16);
    if (scaled) {
        const __m512 factor = _mm512_set1_ps(args->factors[unit->key + j]);
        x0 = _mm512_mul_ps(x0, factor);
        x1 = _mm512_mul_ps(x1, factor);
    }
    __m512 sum = unit->block > 0 ? _mm512_load_ps(state->lanes[j]) : _mm512_setzero_ps();
    /* a NaN stays: vf_max gives its second operand */
    sum = _mm512_fmadd_ps(vf_max(least, x0), _mm512_loadu_ps(weights), sum);
    sum = _mm512_fmadd_ps(vf_max(least, x1), _mm512_loadu_ps(weights + 16), sum);
    _mm512_store_ps(state->lanes[j], sum);
}

/* Sums of a list's lanes, as integers of the same order. A factor that comes after the sum is too
 * late for a sum that overflows, of keys or queries of 1e38, where each score is finite. */
INLINE void index_finish_list(struct index_state *state, const struct index_unit *unit,
                              const int scaled)
{
    const struct index_args *args = state->args;
    int32_t *out = args->out + (int64_t)unit->list * TILE_KEYS + unit->key;
    for (int32_t j = 0; j < UNIT; j += 16) {
        __m512 rows[16];
#pragma GCC unroll 16
        for (int32_t i = 0; i < 16; i++) {
            rows[i] = _mm512_load_ps(state->lanes[j + i]);
        }
        __m512 sum = add_across(rows);
        if (!scaled) {
            sum = _mm512_mul_ps(sum, _mm512_loadu_ps(args->factors + unit->key + j));
        }
        sum = _mm512_add_ps(sum, _mm512_setzero_ps()); /* 0 has no sign */
        const __m512i bits = _mm512_castps_si512(sum);
        const __m512i sign = _mm512_srli_epi32(_mm512_srai_epi32(bits, 31), 1);
        const __mmask16 nan = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
        _mm512_storeu_si512(out + j, _mm512_mask_mov_epi32(_mm512_xor_si512(bits, sign), nan,
                                                           _mm512_set1_epi32(INT32_MAX)));
    }
}

/* Products of a unit, if there is one, and between them the sums of `done`, if there is one, whose
 * scores are in `scores`. The unit's own go there when the next one begins; those of the unit
 * before go to state->chain.to. */
INLINE void index_unit(struct index_state *state, const struct index_keys *keys,
                       const struct index_unit *unit, const struct index_unit *done, float *scores,
                       const int scaled)
{
    const struct index_args *args = state->args;
    const int32_t depth = args->keys.depth;
    const int32_t operations = CHAIN_OPERATIONS * (depth / UNIT);
    int32_t j = 0;
    if (unit != NULL) {
        const int64_t row = (int64_t)unit->list * args->heads + unit->block * UNIT;
        const uint16_t *q = (const uint16_t *)args->q + row * depth;
        for (int32_t at = 0; at < operations; at += CHAIN_OPERATIONS) {
#pragma GCC unroll 8
            for (int i = 0; i < CHAIN_OPERATIONS; i++) {
                const int32_t step = at / CHAIN_OPERATIONS;
                if (at == 0) {
                    chain_operation(i, keys->at, keys->stride, q, 1, &state->chain, NULL, 0);
                } else {
                    chain_operation(i, keys->at + step * UNIT, keys->stride,
                                    q + step * 2 * TILE_ELEMENTS, 0, NULL, NULL, 0);
                }
                lines_step(&state->lines);
                for (; done != NULL && j * operations < (at + i + 1) * UNIT; j++) {
                    index_add_key(state, done, j, scores, scaled);
                }
            }
        }
        state->chain = (struct chain){scores, UNIT, false};
    } else {
        chain_end(&state->chain);
    }
    for (; done != NULL && j < UNIT; j++) {
        index_add_key(state, done, j, scores, scaled);
    }
    if (done != NULL && (done->block + 1) * UNIT == args->heads) {
        index_finish_list(state, done, scaled);
    }
}

INLINE void index_units(struct index_state *state, const int scaled)
{
    const struct index_args *args = state->args;
    struct index_unit unit = {0, 0, 0}, before[2];
    struct index_keys keys = {NULL, 0};
    const int32_t blocks = args->heads / UNIT, strips = (args->keys.keys + UNIT - 1) / UNIT;
    const int32_t units = strips * args->lists * blocks;
    for (int32_t u = 0; u < units + 2; u++) {
        const int32_t turn = u & 1;
        const struct index_unit *done = u >= 2 ? &before[turn] : NULL;
        if (u < units && unit.list == 0 && unit.block == 0) {
            keys = index_find_keys(args, unit.key);
        }
        index_unit(state, &keys, u < units ? &unit : NULL, done, state->scores[turn], scaled);
        before[turn] = unit;
        if (++unit.block == blocks) {
            unit.block = 0;
            if (++unit.list == args->lists) {
                unit.list = 0;
                unit.key += UNIT;
            }
        }
    }
}

static void amx_index_scores(const struct index_args *args)
{
    struct index_state state;
    const int32_t n = (args->keys.keys + UNIT - 1) / UNIT;
    state.args = args;
    state.chain = (struct chain){NULL, 0, false};
    state.lines =
        lines_begin(&args->keys, n * args->lists * (args->heads / UNIT) * (args->keys.depth / 4));
    if (args->scaled) {
        index_units(&state, 1);
    } else {
        index_units(&state, 0);
    }
}

#endif
