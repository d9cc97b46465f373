/* SPDX-License-Identifier: Apache-2.0 */
/* Activations, weights and sums of a tile's products, and the stores of the scores: a thread has
 * two rows of a warp's 16. */
#ifndef CUDA_FLASH_SM90_INDEX_SUMS_CUH
#define CUDA_FLASH_SM90_INDEX_SUMS_CUH

#include <cstdint>

#include "cuda_flash/ptx/ptx.cuh"
#include "gpu/index.h"

#define INDEX_COLUMNS 64 /* a tile has so many, each a head of one list */

/* fmaxf would drop a NaN. */
GPU_INLINE float larger_of(float x, float y)
{
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
    return larger;
}

/* The one of a thread's two rows whose scores it stores, or none: of a list's lanes 2 store. */
struct index_store {
    const int32_t *end; /* ends of the rows that the span's lists see */
    float *scores;      /* the row's, in the span's first list */
    int64_t stride;
    int32_t lists, row;
    float scale, scales[2]; /* scales: both rows' ones, where the best are stored */
};

GPU_INLINE void store_one(const index_store &to, int list, float score)
{
    if (to.row < to.end[list]) {
        to.scores[list * to.stride] = score * to.scale;
    }
}

/* A lane stores one of two rows and its neighbour the other: x becomes the lane's own sum of its
 * row, y its neighbour's sum of that row. */
GPU_INLINE void exchange_rows(float &x, float &y)
{
    const bool is_high = (threadIdx.x & 1) != 0;
    const float own = is_high ? y : x;
    y = __shfl_xor_sync(0xffffffffu, is_high ? x : y, 1);
    x = own;
}

/* Stores the scores of 8 columns' lists, the first of which is `list`, or of one list. sum: two
 * rows' sums of a thread's even and odd columns. A list of 8 columns or more has 4 lanes, of 4
 * has 2. */
template <int HEADS>
GPU_INLINE void store_score(const index_store &to, int list, float (&sum)[2][2])
{
    const int own = threadIdx.x & 3, other = own ^ 1;
    if (HEADS == 1) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            exchange_rows(sum[0][i], sum[1][i]);
            store_one(to, list + own * 2 + i, sum[0][i]);
            store_one(to, list + other * 2 + i, sum[1][i]);
        }
        return;
    }
    float low = sum[0][0] + sum[0][1], high = sum[1][0] + sum[1][1];
    exchange_rows(low, high);
    if (HEADS == 2) {
        store_one(to, list + own, low);
        store_one(to, list + other, high);
        return;
    }
    float score = low + high;
    if (HEADS >= 8) {
        score += __shfl_xor_sync(0xffffffffu, score, 2);
    }
    store_one(to, list + (HEADS == 4 ? own / 2 : 0), score);
}

/* Stores the best scores of a warp's 16 rows: of all lists in 8 columns, or of their one list. */
template <int HEADS>
GPU_INLINE void store_best(const index_store &to, int list, const float (&sum)[2][2])
{
    constexpr int own = HEADS == 1 ? 2 : 1; /* lists of a thread */
    const int lane = threadIdx.x & 31, first = list + (HEADS <= 4 ? (lane & 3) * 2 / HEADS : 0);
#pragma unroll
    for (int i = 0; i < own; i++) {
        const int32_t end = to.end[first + i];
        float best = -INFINITY;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float score = HEADS == 1 ? sum[r][i] : sum[r][0] + sum[r][1];
            if (HEADS >= 4) {
                score += __shfl_xor_sync(0xffffffffu, score, 1);
            }
            if (HEADS >= 8) {
                score += __shfl_xor_sync(0xffffffffu, score, 2);
            }
            best = to.row + r * 8 < end ? larger_of(best, score * to.scales[r]) : best;
        }
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) {
            best = larger_of(best, __shfl_xor_sync(0xffffffffu, best, d));
        }
        if (lane < 4 && lane % (HEADS >= 8 ? 4 : HEADS == 4 ? 2 : 1) == 0 && to.row < end) {
            to.scores[(first + i) * to.stride] = best;
        }
    }
}

/* Sums a tile's columns list by list, and stores the scores. */
template <int HEADS, bool POOLED>
GPU_INLINE void store_scores(const index_store &to, const float *weights, int tile, float least,
                             const float (&acc)[32])
{
    constexpr int last = HEADS >= 8 ? HEADS / 8 - 1 : 0; /* a list's last group of 8 columns */
    float sum[2][2] = {};                                /* one of even and one of odd columns */
#pragma unroll
    for (int b = 0; b < 8; b++) {
        if (HEADS <= 4 && (tile * INDEX_COLUMNS + b * 8) / HEADS >= to.lists) {
            break; /* decodes have few */
        }
        const float2 weight =
            *(const float2 *)&weights[b / 2 * 16 + (threadIdx.x & 3) * 4 + b % 2 * 2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            sum[i][0] = fmaf(larger_of(acc[b * 4 + i * 2], least), weight.x, sum[i][0]);
            sum[i][1] = fmaf(larger_of(acc[b * 4 + i * 2 + 1], least), weight.y, sum[i][1]);
        }
        if ((b & last) == last) {
            const int list = (tile * INDEX_COLUMNS + b * 8) / HEADS;
            if constexpr (POOLED) {
                store_best<HEADS>(to, list, sum);
            } else {
                store_score<HEADS>(to, list, sum);
            }
            sum[0][0] = sum[0][1] = sum[1][0] = sum[1][1] = 0.0f;
        }
    }
}

#endif
