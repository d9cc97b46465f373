/* SPDX-License-Identifier: Apache-2.0 */
/* Decode on BFDOT: rows are query heads of one KV head (1, or blocks of 4), keys and values are
 * read where they lie. Scores: per key D / 8 loads, and a dot instruction for each of them and
 * head. Values: two rows are zipped into pairs, which meet broadcast pairs of probabilities;
 * columns stay in order. */
#ifndef CPU_SIMD_BFDOT_DECODE_H
#define CPU_SIMD_BFDOT_DECODE_H

#include "bfdot_tile.h"
#include "prefetch.h"

INLINE const uint16_t *bf16_key(const struct decode_args *args, int32_t key)
{
    int32_t readable = key < args->keys ? key : args->keys - 1;
    return (const uint16_t *)(args->key_rows[readable] + args->offset);
}

/* Two keys at a time share the loads of q. */
INLINE void bf16_scores_four(float *scores, const uint16_t *q, const struct decode_args *args,
                             int with_prefetch)
{
    struct prefetch prefetch = prefetch_begin(args, (args->keys + 1) / 2);
    for (int32_t j = 0; j < args->keys; j += 2) {
        const uint16_t *even = bf16_key(args, j);
        const uint16_t *odd = bf16_key(args, j + 1);
        vf sum[2][4];
        float folded[2][4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            sum[0][r] = sum[1][r] = vf_set1(0.0f);
        }
        for (int32_t d = 0; d < args->depth; d += 8) {
            bfloat16x8_t x = load_pairs(even + d);
            bfloat16x8_t y = load_pairs(odd + d);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                bfloat16x8_t left = load_pairs(q + r * args->depth + d);
                sum[0][r] = vbfdotq_f32(sum[0][r], left, x);
                sum[1][r] = vbfdotq_f32(sum[1][r], left, y);
            }
        }
        if (with_prefetch) {
            prefetch_step(&prefetch);
        }
        vf_sum_four(folded[0], sum[0][0], sum[0][1], sum[0][2], sum[0][3]);
        vf_sum_four(folded[1], sum[1][0], sum[1][1], sum[1][2], sum[1][3]);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            scores[r * SCORE_STRIDE + j] = folded[0][r];
            scores[r * SCORE_STRIDE + j + 1] = folded[1][r];
        }
    }
}

INLINE void bf16_scores_one(float *scores, const uint16_t *q, const struct decode_args *args)
{
    struct prefetch prefetch = prefetch_begin(args, (args->keys + 3) / 4);
    for (int32_t j = 0; j < args->keys; j += 4) {
        vf sum[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const uint16_t *key = bf16_key(args, j + i);
            sum[i] = vf_set1(0.0f);
            for (int32_t d = 0; d < args->depth; d += 8) {
                sum[i] = vbfdotq_f32(sum[i], load_pairs(q + d), load_pairs(key + d));
            }
        }
        prefetch_step(&prefetch);
        vf_sum_four(scores + j, sum[0], sum[1], sum[2], sum[3]);
    }
}

static void bf16_decode_scores(float *scores, const void *q, const struct decode_args *args)
{
    if (args->rows == 1) {
        bf16_scores_one(scores, q, args);
        return;
    }
    for (int32_t r = 0; r < args->rows; r += 4) {
        bf16_scores_four(scores + (int64_t)r * SCORE_STRIDE,
                         (const uint16_t *)q + (int64_t)r * args->depth, args, r == 0);
    }
}

/* rows x 16 columns from `column` on */
INLINE void bf16_values_block(float *acc, const uint16_t *p, const struct decode_args *args,
                              const int rows, int32_t column, struct prefetch *prefetch)
{
    vf sum[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            sum[r][c] = vf_load(acc + r * args->depth + column + 4 * c);
        }
    }
    for (int32_t j = 0; j < args->keys; j += 2) {
        const uint16_t *even = bf16_key(args, j) + column;
        const uint16_t *odd =
            (j + 1 < args->keys ? bf16_key(args, j + 1) : (const uint16_t *)args->zero_row) +
            column;
        bfloat16x8_t pairs[4];
#pragma GCC unroll 2
        for (int c = 0; c < 2; c++) {
            uint16x8_t x = vld1q_u16(even + 8 * c);
            uint16x8_t y = vld1q_u16(odd + 8 * c);
            pairs[2 * c] = vreinterpretq_bf16_u16(vzip1q_u16(x, y));
            pairs[2 * c + 1] = vreinterpretq_bf16_u16(vzip2q_u16(x, y));
        }
        if (prefetch != NULL) {
            prefetch_step(prefetch);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            bfloat16x8_t left = pair_broadcast(p + r * 2 * SCORE_STRIDE + j);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                sum[r][c] = vbfdotq_f32(sum[r][c], left, pairs[c]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            vf_store(acc + r * args->depth + column + 4 * c, sum[r][c]);
        }
    }
}

INLINE void bf16_values_rows(float *acc, const uint16_t *p, const struct decode_args *args,
                             const int rows, int with_prefetch)
{
    struct prefetch state = prefetch_begin(args, (args->keys + 1) / 2 * (args->depth / 16));
    for (int32_t column = 0; column < args->depth; column += 16) {
        bf16_values_block(acc, p, args, rows, column, with_prefetch ? &state : NULL);
    }
}

static void bf16_decode_values(float *acc, const void *p, const struct decode_args *args)
{
    if (args->rows == 1) {
        bf16_values_rows(acc, p, args, 1, 1);
        return;
    }
    for (int32_t r = 0; r < args->rows; r += 4) {
        bf16_values_rows(acc + (int64_t)r * args->depth,
                         (const uint16_t *)p + (int64_t)r * 2 * SCORE_STRIDE, args, 4, r == 0);
    }
}

static const struct decode_kernels bf16_decode = {.scores = bf16_decode_scores,
                                                  .values = bf16_decode_values};

#endif
