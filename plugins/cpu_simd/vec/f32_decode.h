/* SPDX-License-Identifier: Apache-2.0 */
/* Decode in float32, over the vectors of one ISA: rows are query heads of one KV head (1, or blocks
 * of 4); keys and values are float32 rows, in place or staged. Per key, 4 heads and D floats: 16 D
 * FLOPs; two keys at a time share the loads of q. */
#ifndef CPU_SIMD_F32_DECODE_H
#define CPU_SIMD_F32_DECODE_H

#include "f32_tile.h"
#include "prefetch.h"

INLINE const float *f32_key(const struct decode_args *args, int32_t key)
{
    int32_t readable = key < args->keys ? key : args->keys - 1;
    return (const float *)(args->key_rows[readable] + args->offset);
}

INLINE void f32_scores_four(float *scores, const float *q, const struct decode_args *args,
                            int with_prefetch)
{
    struct prefetch prefetch = prefetch_begin(args, (args->keys + 1) / 2);
    for (int32_t j = 0; j < args->keys; j += 2) {
        const float *even = f32_key(args, j);
        const float *odd = f32_key(args, j + 1);
        vf sum[2][4];
        float folded[2][4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            sum[0][r] = sum[1][r] = vf_set1(0.0f);
        }
        for (int32_t d = 0; d < args->depth; d += VF_WIDTH) {
            vf x = vf_load(even + d);
            vf y = vf_load(odd + d);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                vf left = vf_load(q + r * args->depth + d);
                sum[0][r] = vf_fma(left, x, sum[0][r]);
                sum[1][r] = vf_fma(left, y, sum[1][r]);
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

INLINE void f32_scores_one(float *scores, const float *q, const struct decode_args *args)
{
    struct prefetch prefetch = prefetch_begin(args, (args->keys + 3) / 4);
    for (int32_t j = 0; j < args->keys; j += 4) {
        vf sum[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const float *key = f32_key(args, j + i);
            sum[i] = vf_set1(0.0f);
            for (int32_t d = 0; d < args->depth; d += VF_WIDTH) {
                sum[i] = vf_fma(vf_load(q + d), vf_load(key + d), sum[i]);
            }
        }
        prefetch_step(&prefetch);
        vf_sum_four(scores + j, sum[0], sum[1], sum[2], sum[3]);
    }
}

static void f32_decode_scores(float *scores, const void *q, const struct decode_args *args)
{
    if (args->rows == 1) {
        f32_scores_one(scores, q, args);
        return;
    }
    for (int32_t r = 0; r < args->rows; r += 4) {
        f32_scores_four(scores + (int64_t)r * SCORE_STRIDE,
                        (const float *)q + (int64_t)r * args->depth, args, r == 0);
    }
}

/* rows x VF_COLUMNS vectors of the acc_o */
INLINE void f32_values_block(float *acc, const float *p, const struct decode_args *args,
                             const int rows, const int vectors, int32_t column,
                             struct prefetch *prefetch)
{
    vf sum[4][VF_COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) {
            sum[r][c] = vf_load(acc + r * args->depth + column + c * VF_WIDTH);
        }
    }
    for (int32_t j = 0; j < args->keys; j++) {
        const float *row = f32_key(args, j) + column;
        vf value[VF_COLUMNS];
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) {
            value[c] = vf_load(row + c * VF_WIDTH);
        }
        if (prefetch != NULL) {
            prefetch_step(prefetch);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vf left = vf_set1(p[r * SCORE_STRIDE + j]);
#pragma GCC unroll 4
            for (int c = 0; c < vectors; c++) {
                sum[r][c] = vf_fma(left, value[c], sum[r][c]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) {
            vf_store(acc + r * args->depth + column + c * VF_WIDTH, sum[r][c]);
        }
    }
}

INLINE void f32_values_rows(float *acc, const float *p, const struct decode_args *args,
                            const int rows, int with_prefetch)
{
    const int32_t step = VF_COLUMNS * VF_WIDTH;
    struct prefetch state = prefetch_begin(args, args->keys * ((args->depth + step - 1) / step));
    struct prefetch *prefetch = with_prefetch ? &state : NULL;
    int32_t column = 0;
    for (; column + step <= args->depth; column += step) {
        f32_values_block(acc, p, args, rows, VF_COLUMNS, column, prefetch);
    }
    for (; column < args->depth; column += VF_WIDTH) {
        f32_values_block(acc, p, args, rows, 1, column, NULL);
    }
}

static void f32_decode_values(float *acc, const void *p, const struct decode_args *args)
{
    if (args->rows == 1) {
        f32_values_rows(acc, p, args, 1, 1);
        return;
    }
    for (int32_t r = 0; r < args->rows; r += 4) {
        f32_values_rows(acc + (int64_t)r * args->depth,
                        (const float *)p + (int64_t)r * SCORE_STRIDE, args, 4, r == 0);
    }
}

static const struct decode_kernels f32_decode = {.scores = f32_decode_scores,
                                                 .values = f32_decode_values};

#endif
