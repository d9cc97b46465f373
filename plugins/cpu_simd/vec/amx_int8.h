/* SPDX-License-Identifier: Apache-2.0 */
/* Decode from int8 caches on AMX, 4 rows; more take the vectors of int8_decode.h. Tiles multiply
 * integers, so no code is converted.
 *
 * Scores: 16 keys where they lie are the left operand. A query is 16-bit integers as there, here
 * with an upper and a lower byte of its own sign each, which are two columns of the right one.
 *
 * Values: a probability is an integer of 23 bits and sign, the largest of its row and 64 keys the
 * largest of these; its three bytes, of their own sign each, are rows of the left operand. So a
 * product rounds off 2^-24 of the row's largest. The right operand is values of four keys by turns.
 *
 * 64 keys at D 128: 16 + 8 products of 16 cycles, and 4 shuffles a key. */
#ifndef CPU_SIMD_AMX_INT8_H
#define CPU_SIMD_AMX_INT8_H

#include "amx_decode.h"
#include "int8_decode.h"

enum { AMX_INT8_ROWS = 4, PROBABILITY_BYTES = 3 };

/* the largest of two bytes, and of three, of their own sign */
#define WHOLE_OF_TWO 32639.0f
#define WHOLE_OF_THREE 8355000.0f /* less some: a product may be rounded up */

static float amx_int8_order(void *q, int32_t n)
{
    return int8_order_to(q, n, WHOLE_OF_TWO);
}

/* Makes of 4 rows of 16-bit integers, for each 64 dims, [16][lower of 4 rows, upper][4 dims]. */
static void amx_int8_pack(void *q, void *memory, int32_t rows, int32_t depth)
{
    if (rows != AMX_INT8_ROWS) {
        return;
    }
    memcpy(memory, q, (size_t)rows * (size_t)depth * 2);
    const int16_t *from = memory;
    int8_t *out = q;
    for (int32_t d = 0; d < depth; d += 4, out += 8 * AMX_INT8_ROWS) {
        for (int32_t r = 0; r < AMX_INT8_ROWS; r++) {
            for (int32_t i = 0; i < 4; i++) {
                const int32_t x = from[r * depth + d + i], upper = (x + 128) >> 8;
                out[4 * r + i] = (int8_t)(x - 256 * upper);
                out[4 * (r + AMX_INT8_ROWS) + i] = (int8_t)upper;
            }
        }
    }
}

/* Scores of 16 keys by row, of sums [key][lower of 4 rows, upper]. */
INLINE void amx_int8_store_scores(float *scores, const int32_t *sums, __m512 scale)
{
    const __m512i by_row = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512 of[4]; /* four keys' scores each, [row][key] */
#pragma GCC unroll 4
    for (int32_t i = 0; i < 4; i++) {
        const __m512i x = _mm512_load_si512(sums + 32 * i),
                      y = _mm512_load_si512(sums + 32 * i + 16);
        const __m512i lower = _mm512_shuffle_i32x4(x, y, 0x88);
        const __m512i upper = _mm512_shuffle_i32x4(x, y, 0xdd);
        const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower);
        of[i] = _mm512_cvtepi32_ps(_mm512_permutexvar_epi32(by_row, sum));
    }
    const __m512 a = _mm512_shuffle_f32x4(of[0], of[1], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(of[2], of[3], 0x88);
    const __m512 c = _mm512_shuffle_f32x4(of[0], of[1], 0xdd);
    const __m512 e = _mm512_shuffle_f32x4(of[2], of[3], 0xdd);
    const __m512 rows[] = {_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(c, e, 0x88),
                           _mm512_shuffle_f32x4(a, b, 0xdd), _mm512_shuffle_f32x4(c, e, 0xdd)};
#pragma GCC unroll 4
    for (int32_t r = 0; r < 4; r++) {
        const __m512 by = _mm512_permutexvar_ps(_mm512_set1_epi32(r), scale);
        _mm512_storeu_ps(scores + (int64_t)r * SCORE_STRIDE, _mm512_mul_ps(rows[r], by));
    }
}

static void amx_int8_scores(float *scores, const void *q, const struct decode_args *args)
{
    if (args->rows != AMX_INT8_ROWS) {
        int8_decode_scores(scores, q, args);
        return;
    }
    _Alignas(64) int32_t sums[2][TILE_ROWS * (2 * AMX_INT8_ROWS + 1)];
    _Alignas(64) uint16_t copy[2][TILE_ELEMENTS];
    const struct groups found = find_groups(args), *groups = &found;
    const int64_t stride = 8 * AMX_INT8_ROWS, unit = TILE_ROWS * stride;
    const __m512 scale = _mm512_castps128_ps512(_mm_loadu_ps(args->q_scale));
    struct lines lines = lines_begin(args, groups->count * (args->depth / 64 + 1));
    for (int32_t g = 0; g < groups->count; g++) {
        const char *right = q;
        tiles_and_memory();
        _tile_zero(0);
        for (int32_t d = 0; d < args->depth; d += 64, right += unit) {
            _tile_loadd(4, right, stride);
            if (groups->at[g] != NULL) {
                _tile_loadd(5, groups->at[g] + d, groups->stride[g]);
            } else {
                _tile_loadd(5, gather(copy[d / 64 % 2], groups, g, d), 64);
            }
            _tile_dpbssd(0, 5, 4);
            lines_step(&lines);
        }
        if (g > 0) {
            amx_int8_store_scores(scores + (int64_t)(g - 1) * TILE_ROWS, sums[(g - 1) % 2], scale);
        }
        lines_step(&lines);
        _tile_stored(0, sums[g % 2], stride);
        tiles_and_memory();
    }
    const int32_t last = groups->count - 1;
    amx_int8_store_scores(scores + (int64_t)last * TILE_ROWS, sums[last % 2], scale);
}

/* Up to 64 keys' probabilities as bytes, [byte, the upper first][row]; one[row] is what a lower
 * byte's one is worth. Returns false where one is not finite. */
INLINE bool amx_int8_probabilities(uint8_t *left, __m512 *one, const uint16_t *p, int32_t keys)
{
    const __mmask64 some = keys >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << keys) - 1;
    const __m512i bias = _mm512_set1_epi32(0x808080);
    bool finite = true;
#pragma GCC unroll 4
    for (int32_t r = 0; r < AMX_INT8_ROWS; r++, p += 2 * SCORE_STRIDE) {
        const __m512i a = _mm512_maskz_loadu_epi16((__mmask32)some, p);
        const __m512i b = _mm512_maskz_loadu_epi16((__mmask32)(some >> 32), p + 32);
        const __m512i x[] = {_mm512_cvtepu16_epi32(_mm512_castsi512_si256(a)),
                             _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(a, 1)),
                             _mm512_cvtepu16_epi32(_mm512_castsi512_si256(b)),
                             _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(b, 1))};
        const __m512i magnitude = _mm512_set1_epi16(0x7fff);
        const __m512i most =
            _mm512_max_epu16(_mm512_and_si512(a, magnitude), _mm512_and_si512(b, magnitude));
        /* bf16 are in the order of their bits */
        const __m512i wide = _mm512_max_epu32(_mm512_slli_epi32(most, 16),
                                              _mm512_and_si512(most, _mm512_set1_epi32(-65536)));
        const float top = _mm512_reduce_max_ps(_mm512_castsi512_ps(wide));
        finite = finite && _mm512_reduce_max_epu32(wide) < 0x7f800000u;
        const __m512 factor = _mm512_set1_ps(top > 0.0f ? WHOLE_OF_THREE / top : 0.0f);
        one[r] = _mm512_set1_ps(top / WHOLE_OF_THREE);
#pragma GCC unroll 4
        for (int32_t i = 0; i < 4; i++) {
            const __m512 number = _mm512_castsi512_ps(_mm512_slli_epi32(x[i], 16));
            __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(number, factor));
            whole = _mm512_xor_si512(_mm512_add_epi32(whole, bias), bias);
#pragma GCC unroll 3
            for (int32_t byte = 0; byte < PROBABILITY_BYTES; byte++) {
                const int32_t row = (PROBABILITY_BYTES - 1 - byte) * AMX_INT8_ROWS + r;
                _mm_store_si128((__m128i *)(void *)(left + 64 * row + 16 * i),
                                _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8 * byte)));
            }
        }
    }
    return finite;
}

/* Keys first .. first + 63, 64 columns from args->column on, as four right operands in the order of
 * columns of codes_decode.h. */
INLINE void amx_int8_stage_values(uint8_t *out, const struct decode_args *args, int32_t first,
                                  struct lines *lines)
{
    for (int32_t i = 0; i < TILE_ROWS; i++, out += 64) {
        __m512i x[4];
#pragma GCC unroll 4
        for (int32_t n = 0; n < 4; n++) {
            const int32_t j = first + 4 * i + n;
            const char *row = j < args->keys ? (const char *)key_row(args, j) : args->zero_row;
            x[n] = _mm512_loadu_si512(row + args->column);
        }
        const __m512i front = _mm512_unpacklo_epi8(x[0], x[1]);
        const __m512i front_next = _mm512_unpackhi_epi8(x[0], x[1]);
        const __m512i back = _mm512_unpacklo_epi8(x[2], x[3]);
        const __m512i back_next = _mm512_unpackhi_epi8(x[2], x[3]);
        _mm512_store_si512(out, _mm512_unpacklo_epi16(front, back));
        _mm512_store_si512(out + 1024, _mm512_unpackhi_epi16(front, back));
        _mm512_store_si512(out + 2048, _mm512_unpacklo_epi16(front_next, back_next));
        _mm512_store_si512(out + 3072, _mm512_unpackhi_epi16(front_next, back_next));
        lines_step(lines);
    }
}

INLINE void amx_int8_products(const uint8_t *left, const uint8_t *right,
                              int32_t (*sums)[TILE_ROWS][16])
{
    tiles_and_memory();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, left, 64);
    _tile_loadd(6, right, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, right + 1024, 64);
    _tile_dpbssd(1, 4, 7);
    _tile_loadd(6, right + 2048, 64);
    _tile_dpbssd(2, 4, 6);
    _tile_loadd(7, right + 3072, 64);
    _tile_dpbssd(3, 4, 7);
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    tiles_and_memory();
}

/* Adds sums of 64 columns to their acc_o. */
INLINE void amx_int8_add(float *acc, int32_t depth, int32_t (*sums)[TILE_ROWS][16],
                         const __m512 *one)
{
#pragma GCC unroll 4
    for (int32_t r = 0; r < AMX_INT8_ROWS; r++, acc += depth) {
#pragma GCC unroll 4
        for (int32_t t = 0; t < 4; t++) {
            const __m512i upper = _mm512_load_si512(sums[t][r]);
            const __m512i middle = _mm512_load_si512(sums[t][r + AMX_INT8_ROWS]);
            const __m512i lower = _mm512_load_si512(sums[t][r + 2 * AMX_INT8_ROWS]);
            const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(upper, 8), middle);
            const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(both), _mm512_set1_ps(256.0f),
                                               _mm512_cvtepi32_ps(lower));
            _mm512_storeu_ps(acc + 16 * t,
                             _mm512_fmadd_ps(sum, one[r], _mm512_loadu_ps(acc + 16 * t)));
        }
    }
}

static void amx_int8_values(float *acc, const void *p, const struct decode_args *args)
{
    _Alignas(64) uint8_t left[2][4 * TILE_ROWS * TILE_ROWS], right[2][4 * 1024];
    _Alignas(64) int32_t sums[2][4][TILE_ROWS][16];
    const int32_t steps = (args->keys + 63) / 64, blocks = args->depth / 64;
    __m512 one[2][AMX_INT8_ROWS];
    bool finite = args->rows == AMX_INT8_ROWS;
    for (int32_t s = 0; s < steps && finite; s++) {
        memset(left[s] + 64 * PROBABILITY_BYTES * AMX_INT8_ROWS, 0, 64 * AMX_INT8_ROWS);
        finite = amx_int8_probabilities(left[s], one[s], (const uint16_t *)p + 64 * s,
                                        args->keys - 64 * s);
    }
    if (!finite) {
        int8_decode_values(acc, p, args);
        return;
    }
    struct decode_args block = *args;
    struct lines lines = lines_begin(args, blocks * steps * TILE_ROWS);
    /* a unit is filled before the products of the one before, whose sums are read after those */
    for (int32_t u = 0; u < blocks * steps + 2; u++) {
        if (u < blocks * steps) {
            block.column = u / steps * 64;
            amx_int8_stage_values(right[u % 2], &block, u % steps * 64, &lines);
        }
        if (u > 1) {
            amx_int8_add(acc + (u - 2) / steps * 64, args->depth, sums[u % 2],
                         one[(u - 2) % steps]);
        }
        if (u > 0 && u <= blocks * steps) {
            amx_int8_products(left[(u - 1) % steps], right[(u - 1) % 2], sums[(u - 1) % 2]);
        }
    }
}

static const struct decode_kernels amx_int8_decode = {
    .scores = amx_int8_scores,
    .values = amx_int8_values,
    .finish = codes_finish,
    .order = amx_int8_order,
    .pack = amx_int8_pack,
    .many_rows = AMX_INT8_ROWS,
    .tiles = true,
};

#endif
