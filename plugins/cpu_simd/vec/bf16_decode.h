/* SPDX-License-Identifier: Apache-2.0 */
/* Decode on AVX512_BF16: rows are query heads of one KV head (1, or blocks of 4), keys and values
 * are read in place.
 *
 * Scores: 32 dims of four keys and four heads take 8 loads and 16 dot instructions, whose partial
 * sums are folded at the end. Values: two rows are interleaved into pairs (2 shuffles for 32
 * columns) and multiplied with broadcast pairs of probabilities; columns stay in the interleaved
 * order until decode_finish. */
#ifndef CPU_SIMD_BF16_DECODE_H
#define CPU_SIMD_BF16_DECODE_H

#include "bf16_tile.h"
#include "prefetch.h"

enum { MANY_ROWS = 12 }; /* rows of a head from which arithmetic is the bound */

/* Four rows read memory faster than they compute, more rows do not. */
struct pace {
    struct prefetch single;
    struct burst burst;
};

INLINE struct pace pace_begin(const struct decode_args *args, int32_t steps, const int many)
{
    struct pace pace = {.single = {.args = NULL}};
    if (many) {
        pace.burst = burst_begin(args, steps);
    } else {
        pace.single = prefetch_begin(args, steps);
    }
    return pace;
}

INLINE void pace_step(struct pace *pace, const int many)
{
    if (many) {
        prefetch_burst(&pace->burst);
    } else {
        prefetch_step(&pace->single);
    }
}

/* Lane l of the result: partial sums of a, b, c, d over lane l. */
INLINE __m512 fold_four(__m512 a, __m512 b, __m512 c, __m512 d)
{
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    return _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
}

/* Lane i of the result: the sum of v[i]'s lanes. */
INLINE __m512 fold_lanes(const __m512 *v)
{
    __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88),
                             _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
    __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x88),
                             _mm512_shuffle_f32x4(v[2], v[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

INLINE const uint16_t *key_row(const struct decode_args *args, int32_t key)
{
    int32_t readable = key < args->keys ? key : args->keys - 1;
    return (const uint16_t *)(args->key_rows[readable] + args->offset);
}

/* Four keys and four rows; chunks of 32 dims, a constant where this is inlined or 0. */
INLINE void decode_scores_block(float *scores, const uint16_t *q, const uint16_t *const *key,
                                int32_t depth, const int fixed_chunks, struct pace *pace,
                                const int many)
{
    const int chunks = fixed_chunks > 0 ? fixed_chunks : depth / 32;
    const __m512i by_head = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512 sum[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            sum[i][r] = _mm512_setzero_ps();
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < chunks; c++) {
        __m512i x[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            x[i] = _mm512_loadu_si512(key[i] + 32 * c);
        }
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            __m512i left = _mm512_loadu_si512(q + r * depth + 32 * c);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                sum[i][r] = _mm512_dpbf16_ps(sum[i][r], bf16_bits(left), bf16_bits(x[i]));
            }
        }
        if (c < 4) {
            pace_step(pace, many);
        }
    }
    for (int c = chunks; c < 4; c++) {
        pace_step(pace, many);
    }
    __m512 folded[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        folded[i] = fold_four(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    }
    __m512 all = _mm512_permutexvar_ps(by_head, fold_lanes(folded));
    _mm_storeu_ps(scores, _mm512_castps512_ps128(all));
    _mm_storeu_ps(scores + SCORE_STRIDE, _mm512_extractf32x4_ps(all, 1));
    _mm_storeu_ps(scores + 2 * SCORE_STRIDE, _mm512_extractf32x4_ps(all, 2));
    _mm_storeu_ps(scores + 3 * SCORE_STRIDE, _mm512_extractf32x4_ps(all, 3));
}

/* Keys outside: four of them stay near for all rows. */
INLINE void decode_scores_rows(float *scores, const uint16_t *q, const struct decode_args *args,
                               const int fixed_chunks, const int many)
{
    const int32_t depth = fixed_chunks > 0 ? 32 * fixed_chunks : args->depth;
    struct pace pace = pace_begin(args, (args->keys + 3) / 4 * args->rows, many);
    for (int32_t j = 0; j < args->keys; j += 4) {
        const uint16_t *key[4] = {key_row(args, j), key_row(args, j + 1), key_row(args, j + 2),
                                  key_row(args, j + 3)};
        for (int32_t r = 0; r < args->rows; r += 4) {
            decode_scores_block(scores + (int64_t)r * SCORE_STRIDE + j, q + (int64_t)r * depth, key,
                                depth, fixed_chunks, &pace, many);
        }
    }
}

static void decode_scores_one(float *scores, const uint16_t *q, const struct decode_args *args)
{
    struct prefetch prefetch = prefetch_begin(args, (args->keys + 15) / 16 * 16);
    const int chunks = args->depth / 32;
    for (int32_t j = 0; j < args->keys; j += 16) {
        __m512 folded[4];
        for (int32_t g = 0; g < 4; g++) {
            __m512 sum[4];
#pragma GCC unroll 4
            for (int32_t i = 0; i < 4; i++) {
                const uint16_t *key = key_row(args, j + 4 * g + i);
                sum[i] = _mm512_setzero_ps();
                for (int c = 0; c < chunks; c++) {
                    __m512i x = _mm512_loadu_si512(key + 32 * c);
                    __m512i left = _mm512_loadu_si512(q + 32 * c);
                    sum[i] = _mm512_dpbf16_ps(sum[i], bf16_bits(left), bf16_bits(x));
                }
                prefetch_step(&prefetch);
            }
            folded[g] = fold_four(sum[0], sum[1], sum[2], sum[3]);
        }
        _mm512_storeu_ps(scores + j, fold_lanes(folded));
    }
}

static void bf16_decode_scores(float *scores, const void *q, const struct decode_args *args)
{
    if (args->rows == 1) {
        decode_scores_one(scores, q, args);
        return;
    }
    if (args->rows > 4) {
        decode_scores_rows(scores, q, args, 0, 1);
    } else if (args->depth == 128) {
        decode_scores_rows(scores, q, args, 4, 0);
    } else if (args->depth == 64) {
        decode_scores_rows(scores, q, args, 2, 0);
    } else {
        decode_scores_rows(scores, q, args, 0, 0);
    }
}

/* rows x (32 chunks) columns from `column` on, 16 vectors of sums at most */
INLINE void decode_values_block(float *acc, const uint16_t *p, const struct decode_args *args,
                                const int rows, const int chunks, int32_t column, struct pace *pace,
                                const int many)
{
    __m512 sum[8][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < 2 * chunks; c++) {
            sum[r][c] = _mm512_loadu_ps(acc + r * args->depth + column + 16 * c);
        }
    }
    for (int32_t j = 0; j < args->keys; j += 2) {
        const uint16_t *even = key_row(args, j) + column;
        const uint16_t *odd =
            (j + 1 < args->keys ? key_row(args, j + 1) : (const uint16_t *)args->zero_row) + column;
        __m512i pair[4];
#pragma GCC unroll 2
        for (int c = 0; c < chunks; c++) {
            __m512i x = _mm512_loadu_si512(even + 32 * c);
            __m512i y = _mm512_loadu_si512(odd + 32 * c);
            pair[2 * c] = _mm512_unpacklo_epi16(x, y);
            pair[2 * c + 1] = _mm512_unpackhi_epi16(x, y);
        }
        pace_step(pace, many);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            __m512i left = pair_broadcast(p + r * 2 * SCORE_STRIDE + j);
#pragma GCC unroll 4
            for (int c = 0; c < 2 * chunks; c++) {
                sum[r][c] = _mm512_dpbf16_ps(sum[r][c], bf16_bits(left), bf16_bits(pair[c]));
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < 2 * chunks; c++) {
            _mm512_storeu_ps(acc + r * args->depth + column + 16 * c, sum[r][c]);
        }
    }
}

/* Columns outside: a block's piece of (32 chunks) columns stays near for all rows. */
INLINE void decode_values_rows(float *acc, const uint16_t *p, const struct decode_args *args,
                               const int rows, const int chunks, const int many)
{
    const int32_t columns = 32 * chunks;
    int32_t blocks = (args->depth + columns - 1) / columns * (args->rows / rows);
    struct pace pace = pace_begin(args, (args->keys + 1) / 2 * blocks, many);
    for (int32_t column = 0; column < args->depth; column += columns) {
        for (int32_t r = 0; r < args->rows; r += rows) {
            float *a = acc + (int64_t)r * args->depth;
            const uint16_t *left = p + (int64_t)r * 2 * SCORE_STRIDE;
            if (column + columns <= args->depth) {
                decode_values_block(a, left, args, rows, chunks, column, &pace, many);
            } else {
                decode_values_block(a, left, args, rows, 1, column, &pace, many);
            }
        }
    }
}

static void bf16_decode_values(float *acc, const void *p, const struct decode_args *args)
{
    if (args->rows == 1) {
        decode_values_rows(acc, p, args, 1, 2, 0);
    } else if (args->rows == 4) {
        decode_values_rows(acc, p, args, 4, 2, 0);
    } else if (args->rows % 8 == 0) {
        decode_values_rows(acc, p, args, 8, 1, 1);
    } else {
        decode_values_rows(acc, p, args, 4, 2, 1);
    }
}

/* Interleaving two rows of 32 gave columns 0-3, 8-11, 16-19, 24-27 and then the others. */
static bool bf16_decode_finish(float *sums, int32_t rows, int32_t depth)
{
    const __m512i front = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i back = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int32_t d = 0; d < rows * depth; d += 32) {
        __m512d low = _mm512_castps_pd(_mm512_loadu_ps(sums + d));
        __m512d high = _mm512_castps_pd(_mm512_loadu_ps(sums + d + 16));
        _mm512_storeu_ps(sums + d, _mm512_castpd_ps(_mm512_permutex2var_pd(low, front, high)));
        _mm512_storeu_ps(sums + d + 16, _mm512_castpd_ps(_mm512_permutex2var_pd(low, back, high)));
    }
    return true;
}

static const struct decode_kernels bf16_decode = {
    .scores = bf16_decode_scores,
    .values = bf16_decode_values,
    .finish = bf16_decode_finish,
    .many_rows = MANY_ROWS,
};

#endif
