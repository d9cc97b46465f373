/* SPDX-License-Identifier: Apache-2.0 */
/* Decode from fp8 caches on AMX, 4 to 16 rows: codes are converted to bf16 as a tile is filled.
 * Order and columns are those of codes_decode.h.
 *
 * For e4m3 the upper byte depends on 6 bits (the code shifted by one with its last bit kept), the
 * lower byte on the last 4 bits and on whether the others are 0: one look-up in a register each,
 * where a look-up by all 7 bits would take two of three instructions each. NaNs take a slower path.
 * 64 codes: 10 instructions, 5 cycles; 16 keys by 32 dims: a product of 16 cycles for 4 to 16 rows.
 */
#ifndef CPU_SIMD_AMX_CODES_H
#define CPU_SIMD_AMX_CODES_H

#include "amx_decode.h"
#include "codes_decode.h"

/* Upper bytes by the index above, which is x for code 2 x. */
#define BF16_OF_E4M3_PAIR(x) BF16_OF_E4M3(2 * (x))
static const uint8_t table_e4m3_high[] = {OF_64(HIGH_BYTE, BF16_OF_E4M3_PAIR, 0)};

struct e4m3_lookup {
    __m512i low;
    __m512i high;
    __m512i most[2]; /* largest of all codes seen, as unsigned and as signed bytes */
};

INLINE struct e4m3_lookup e4m3_begin(void)
{
    return (struct e4m3_lookup){_mm512_loadu_si512(table_e4m3.low),
                                _mm512_loadu_si512(table_e4m3_high),
                                {_mm512_setzero_si512(), _mm512_setzero_si512()}};
}

/* 64 codes as two vectors of bf16, in the order of bytes_load */
INLINE void e4m3_widen(struct e4m3_lookup *lookup, __m512i codes, __m512i *first, __m512i *second)
{
    __m512i shifted = _mm512_srli_epi16(codes, 1);
    /* codes | (shifted & 0x20), shifted | (codes & 1), high | (codes & 0x80) */
    __m512i low = _mm512_ternarylogic_epi32(codes, shifted, _mm512_set1_epi8(0x20), 0xf8);
    __m512i high = _mm512_ternarylogic_epi32(shifted, codes, _mm512_set1_epi8(1), 0xf8);
    low = _mm512_permutexvar_epi8(low, lookup->low);
    high = _mm512_permutexvar_epi8(high, lookup->high);
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xf8);
    lookup->most[0] = _mm512_max_epu8(lookup->most[0], codes);
    lookup->most[1] = _mm512_max_epi8(lookup->most[1], codes);
    *first = _mm512_unpacklo_epi8(low, high);
    *second = _mm512_unpackhi_epi8(low, high);
}

/* Whether there was a NaN, 0x7f or 0xff. */
INLINE bool e4m3_nan(const struct e4m3_lookup *lookup)
{
    return (_mm512_cmpeq_epi8_mask(lookup->most[0], _mm512_set1_epi8((char)0xff)) |
            _mm512_cmpeq_epi8_mask(lookup->most[1], _mm512_set1_epi8(0x7f))) != 0;
}

/* Up to 16 keys from `first` on, dims 64 c .. 64 c + 63, as two left operands. Returns whether the
 * short tables met a NaN. */
INLINE bool fp8_widen_keys(uint16_t *out, const struct decode_args *args, int32_t first, int32_t c,
                           const int short_tables, struct lines *lines)
{
    const struct code_lookup whole = code_lookup_of(args->element, CODES_FP8);
    struct e4m3_lookup lookup = e4m3_begin();
#pragma GCC unroll 4
    for (int32_t i = 0; i < TILE_ROWS; i++) {
        __m512i x, y, codes = _mm512_loadu_si512((const char *)key_row(args, first + i) + 64 * c);
        if (short_tables) {
            e4m3_widen(&lookup, codes, &x, &y);
        } else {
            bytes_widen(&whole, codes, CODES_FP8, &x, &y);
        }
        _mm512_store_si512(out + 32 * i, x);
        _mm512_store_si512(out + TILE_ELEMENTS + 32 * i, y);
        lines_step(lines);
    }
    return short_tables && e4m3_nan(&lookup);
}

static void fp8_stage_keys(uint16_t *out, const struct decode_args *args, int32_t first, int32_t c,
                           struct lines *lines)
{
    if (args->element != ELEMENT_E4M3 || fp8_widen_keys(out, args, first, c, 1, lines)) {
        fp8_widen_keys(out, args, first, c, 0, lines);
    }
}

/* Transposes [key][row] sums of 16 keys into scores; rows of sums are `args->rows` apart. */
INLINE void amx_scores_of_keys(float *scores, const float *sums, const struct decode_args *args)
{
    __m512 block[TILE_ROWS];
    if (args->rows == 4) {
        const __m512i front =
            _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
        const __m512i back = _mm512_add_epi32(front, _mm512_set1_epi32(2));
        for (int32_t i = 0; i < 4; i += 2) {
            __m512 x = _mm512_loadu_ps(sums + 16 * i), y = _mm512_loadu_ps(sums + 16 * i + 16);
            block[i] = _mm512_permutex2var_ps(x, front, y);
            block[i + 1] = _mm512_permutex2var_ps(x, back, y);
        }
        _mm512_storeu_ps(scores, _mm512_shuffle_f32x4(block[0], block[2], 0x44));
        _mm512_storeu_ps(scores + SCORE_STRIDE, _mm512_shuffle_f32x4(block[0], block[2], 0xee));
        _mm512_storeu_ps(scores + 2 * SCORE_STRIDE, _mm512_shuffle_f32x4(block[1], block[3], 0x44));
        _mm512_storeu_ps(scores + 3 * SCORE_STRIDE, _mm512_shuffle_f32x4(block[1], block[3], 0xee));
        return;
    }
#pragma GCC unroll 16
    for (int32_t i = 0; i < TILE_ROWS; i++) {
        block[i] = _mm512_loadu_ps(sums + args->rows * i);
    }
    vf_transpose(block);
#pragma GCC unroll 16
    for (int32_t r = 0; r < TILE_ROWS; r++) {
        if (r < args->rows) {
            _mm512_storeu_ps(scores + (int64_t)r * SCORE_STRIDE, block[r]);
        }
    }
}

static void amx_fp8_scores(float *scores, const void *q, const struct decode_args *args)
{
    /* rows of a tile overlap where there are fewer than 16 */
    _Alignas(64) float sums[TILE_ROWS * TILE_ROWS];
    _Alignas(64) uint16_t keys[2][2 * TILE_ELEMENTS];
    const int32_t chunks = args->depth / 64, groups = (args->keys + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t stride = 4 * (int64_t)args->rows, unit = 16 * stride;
    struct lines lines = lines_begin(args, chunks * groups * TILE_ROWS);
    for (int32_t g = 0; g < groups; g++) {
        const char *left = q;
        _tile_zero(0);
        for (int32_t c = 0; c < chunks; c++, left += 2 * unit) {
            fp8_stage_keys(keys[c % 2], args, g * TILE_ROWS, c, &lines);
            tiles_and_memory();
            _tile_loadd(2, keys[c % 2], 64);
            _tile_loadd(6, left, stride);
            _tile_dpbf16ps(0, 2, 6);
            _tile_loadd(3, keys[c % 2] + TILE_ELEMENTS, 64);
            _tile_loadd(7, left + unit, stride);
            _tile_dpbf16ps(0, 3, 7);
        }
        _tile_stored(0, sums, stride);
        tiles_and_memory();
        amx_scores_of_keys(scores + (int64_t)g * TILE_ROWS, sums, args);
    }
}

/* Keys first .. first + 31, 64 columns from args->column on: four right operands. */
INLINE bool fp8_widen_values(uint16_t *out, const struct decode_args *args, int32_t first,
                             const int short_tables, struct lines *lines)
{
    const struct code_lookup whole = code_lookup_of(args->element, CODES_FP8);
    struct e4m3_lookup lookup = e4m3_begin();
#pragma GCC unroll 2
    for (int32_t i = 0; i < TILE_ROWS; i++) {
        const int32_t j = first + 2 * i;
        const char *even = j < args->keys ? (const char *)key_row(args, j) : args->zero_row;
        const char *odd = j + 1 < args->keys ? (const char *)key_row(args, j + 1) : args->zero_row;
        __m512i x = _mm512_loadu_si512(even + args->column);
        __m512i y = _mm512_loadu_si512(odd + args->column);
        __m512i low = _mm512_unpacklo_epi8(x, y), high = _mm512_unpackhi_epi8(x, y), pair[4];
        if (short_tables) {
            e4m3_widen(&lookup, low, &pair[0], &pair[1]);
            e4m3_widen(&lookup, high, &pair[2], &pair[3]);
        } else {
            bytes_widen(&whole, low, CODES_FP8, &pair[0], &pair[1]);
            bytes_widen(&whole, high, CODES_FP8, &pair[2], &pair[3]);
        }
#pragma GCC unroll 4
        for (int32_t t = 0; t < 4; t++) {
            _mm512_store_si512(out + t * TILE_ELEMENTS + 32 * i, pair[t]);
        }
        lines_step(lines);
    }
    return short_tables && e4m3_nan(&lookup);
}

static void fp8_stage_values(uint16_t *out, const struct decode_args *args, int32_t first,
                             struct lines *lines)
{
    if (args->element != ELEMENT_E4M3 || fp8_widen_values(out, args, first, 1, lines)) {
        fp8_widen_values(out, args, first, 0, lines);
    }
}

static void amx_fp8_values(float *acc, const void *p, const struct decode_args *args)
{
    _Alignas(64) uint16_t left[2][TILE_ELEMENTS], pairs[2][4 * TILE_ELEMENTS];
    _Alignas(64) float sums[4][TILE_ROWS][16];
    const int32_t steps = (args->keys + 31) / 32;
    struct decode_args block = *args;
    struct lines lines = lines_begin(args, args->depth / 64 * steps * TILE_ROWS);
    for (int32_t s = 0; s < steps; s++) {
        amx_load_probabilities(left[s], (const uint16_t *)p + 32 * s, args->rows,
                               args->keys - 32 * s);
    }
    tiles_and_memory();
    for (block.column = 0; block.column < args->depth; block.column += 64) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int32_t s = 0; s < steps; s++) {
            fp8_stage_values(pairs[s], &block, 32 * s, &lines);
            tiles_and_memory();
            _tile_loadd(4, left[s], 64);
            _tile_loadd(6, pairs[s], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, pairs[s] + TILE_ELEMENTS, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, pairs[s] + 2 * TILE_ELEMENTS, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, pairs[s] + 3 * TILE_ELEMENTS, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        tiles_and_memory();
        for (int32_t r = 0; r < args->rows; r++) {
            float *out = acc + (int64_t)r * args->depth + block.column;
#pragma GCC unroll 4
            for (int32_t t = 0; t < 4; t++) {
                __m512 sum =
                    _mm512_add_ps(_mm512_loadu_ps(out + 16 * t), _mm512_load_ps(sums[t][r]));
                _mm512_storeu_ps(out + 16 * t, sum);
            }
        }
    }
}

static const struct decode_kernels amx_fp8_decode = {
    .scores = amx_fp8_scores,
    .values = amx_fp8_values,
    .finish = codes_finish,
    .order = fp8_order,
    .pack = amx_pack_rows,
};

#endif
