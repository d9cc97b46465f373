/* SPDX-License-Identifier: Apache-2.0 */
/* Decode over the vectors of one ISA: rows are query heads of one KV head (1, or blocks of 4); keys
 * and values are rows of float32, in place or staged, or of bf16, whose products are of pairs. Per
 * key, 4 heads and D elements: 16 D FLOPs; two keys at a time share the loads of q. */
#ifndef CPU_SIMD_F32_DECODE_H
#define CPU_SIMD_F32_DECODE_H

#include "f32_tile.h"
#include "prefetch.h"

/* A key's row, of floats or of pairs. */
INLINE const float *tile_key(const struct decode_args *args, int32_t key)
{
    int32_t readable = key < args->keys ? key : args->keys - 1;
    return (const float *)(const void *)(args->key_rows[readable] + args->offset);
}

INLINE void tile_scores_four(float *scores, const float *q, const struct decode_args *args,
                             int32_t depth, int with_prefetch, const bool pairs)
{
    struct prefetch prefetch = prefetch_begin(args, (args->keys + 1) / 2);
    for (int32_t j = 0; j < args->keys; j += 2) {
        const float *even = tile_key(args, j);
        const float *odd = tile_key(args, j + 1);
        vf sum[2][4];
        float folded[2][4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            sum[0][r] = sum[1][r] = vf_set1(0.0f);
        }
        for (int32_t d = 0; d < depth; d += VF_WIDTH) {
            vf x = vf_load(even + d);
            vf y = vf_load(odd + d);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                vf left = vf_load(q + r * depth + d);
                sum[0][r] = vf_dot(left, x, sum[0][r], pairs);
                sum[1][r] = vf_dot(left, y, sum[1][r], pairs);
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

INLINE void tile_scores_one(float *scores, const float *q, const struct decode_args *args,
                            int32_t depth, const bool pairs)
{
    struct prefetch prefetch = prefetch_begin(args, (args->keys + 3) / 4);
    for (int32_t j = 0; j < args->keys; j += 4) {
        vf sum[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const float *key = tile_key(args, j + i);
            sum[i] = vf_set1(0.0f);
            for (int32_t d = 0; d < depth; d += VF_WIDTH) {
                sum[i] = vf_dot(vf_load(q + d), vf_load(key + d), sum[i], pairs);
            }
        }
        prefetch_step(&prefetch);
        vf_sum_four(scores + j, sum[0], sum[1], sum[2], sum[3]);
    }
}

INLINE void tile_decode_scores(float *scores, const float *q, const struct decode_args *args,
                               const bool pairs)
{
    const int32_t depth = pairs ? args->depth / 2 : args->depth;
    if (args->rows == 1) {
        tile_scores_one(scores, q, args, depth, pairs);
        return;
    }
    for (int32_t r = 0; r < args->rows; r += 4) {
        tile_scores_four(scores + (int64_t)r * SCORE_STRIDE, q + (int64_t)r * depth, args, depth,
                         r == 0, pairs);
    }
}

/* rows x `vectors` vectors of acc_o; with pairs two keys at a time */
INLINE void tile_values_block(float *acc, const float *p, const struct decode_args *args,
                              const int rows, const int vectors, int32_t column,
                              struct prefetch *prefetch, const bool pairs)
{
    vf sum[4][VF_COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) {
            sum[r][c] = vf_load(acc + r * args->depth + column + c * VF_WIDTH);
        }
    }
    for (int32_t j = 0; j < args->keys; j += pairs ? 2 : 1, p++) {
        vf value[VF_COLUMNS];
        if (pairs) {
            const void *odd = j + 1 < args->keys ? tile_key(args, j + 1) : args->zero_row;
            vf_load_pairs(value, (const uint16_t *)(const void *)tile_key(args, j) + column,
                          (const uint16_t *)odd + column, vectors);
        }
#pragma GCC unroll 4
        for (int c = 0; c < vectors && !pairs; c++) {
            value[c] = vf_load(tile_key(args, j) + column + c * VF_WIDTH);
        }
        if (prefetch != NULL) {
            prefetch_step(prefetch);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vf left = vf_broadcast(p + r * SCORE_STRIDE);
#pragma GCC unroll 4
            for (int c = 0; c < vectors; c++) {
                sum[r][c] = vf_dot(left, value[c], sum[r][c], pairs);
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

INLINE void tile_values_rows(float *acc, const float *p, const struct decode_args *args,
                             const int rows, int with_prefetch, const bool pairs)
{
    const int32_t step = VF_COLUMNS * VF_WIDTH, calls = pairs ? (args->keys + 1) / 2 : args->keys;
    struct prefetch state = prefetch_begin(args, calls * ((args->depth + step - 1) / step));
    struct prefetch *prefetch = with_prefetch ? &state : NULL;
    int32_t column = 0;
    for (; column + step <= args->depth; column += step) {
        tile_values_block(acc, p, args, rows, VF_COLUMNS, column, prefetch, pairs);
    }
    for (; column < args->depth && !pairs; column += VF_WIDTH) {
        tile_values_block(acc, p, args, rows, 1, column, NULL, pairs);
    }
}

INLINE void tile_decode_values(float *acc, const float *p, const struct decode_args *args,
                               const bool pairs)
{
    if (args->rows == 1) {
        tile_values_rows(acc, p, args, 1, 1, pairs);
        return;
    }
    for (int32_t r = 0; r < args->rows; r += 4) {
        tile_values_rows(acc + (int64_t)r * args->depth, p + (int64_t)r * SCORE_STRIDE, args, 4,
                         r == 0, pairs);
    }
}

static void f32_decode_scores(float *scores, const void *q, const struct decode_args *args)
{
    tile_decode_scores(scores, q, args, false);
}

static void f32_decode_values(float *acc, const void *p, const struct decode_args *args)
{
    tile_decode_values(acc, p, args, false);
}

static const struct decode_kernels f32_decode = {.scores = f32_decode_scores,
                                                 .values = f32_decode_values};

static const struct tile_kernels f32_kernels = {
    .element_bytes = 4,
    .element = ELEMENT_F32,
    .row_block = 24,
    .decode_rows = 8,
    .unpack = {f32_from_f32, f32_from_f16, f32_from_bf16, f32_from_e4m3, f32_from_e5m2,
               f32_from_int8},
    .pack_keys = f32_pack_keys,
    .pack_values = f32_pack_values,
    .gemm = f32_gemm,
    .softmax = f32_softmax,
    .decode = &f32_decode,
};

#endif
