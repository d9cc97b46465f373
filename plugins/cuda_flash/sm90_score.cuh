/* SPDX-License-Identifier: Apache-2.0 */
/* Scores of a tile in a lane's registers: terms, masks where a tile needs them, online softmax.
 * Sum i of a lane: its row (i >> 1) & 1 of two, key (i >> 2) * 8 + (i & 1) from its first on. No
 * function here may be a call: wgmma would wait for each other across it. The compiler has several
 * copies of this, which give the same bits: products that may be fused are written as fused. */
#ifndef CUDA_FLASH_SM90_SCORE_CUH
#define CUDA_FLASH_SM90_SCORE_CUH

#include "sm90_shape.cuh"

/* What a lane's two rows of an item see, 8 rows apart. Rows that are not there see everything, so
 * that no tile is masked for them. */
struct prefill_rows {
    int32_t first[2], last[2], position[2];
    float slope[2];
};

/* An interval even with spans: each that holds the query's position only makes it longer. */
static __device__ __forceinline__ gpu_interval visible_to(const gpu_params &p,
                                                          const gpu_request &request, int32_t index)
{
    gpu_interval v = interval_of(p.problem, request, index);
    if (p.problem.spans != nullptr) {
#pragma unroll 1
        for (int32_t s = p.problem.span_start[request.r]; s < p.problem.span_start[request.r + 1];
             s++) {
            int32_t first = p.problem.spans[2 * s], last = p.problem.spans[2 * s + 1];
            if (v.position < first || v.position > last) {
                continue;
            }
            if (p.problem.prefix_lm_window > 0) {
                first = max(first, v.position - p.problem.prefix_lm_window + 1);
            }
            v.first = min(v.first, first);
            v.last = max(v.last, min(last, request.length - 1));
        }
    }
    v.first = max(v.first, 0);
    return v;
}

/* Rows `row` and row + 8 of an item. */
static __device__ __forceinline__ void enter_rows(const prefill_params &a, const prefill_item &item,
                                                  int32_t row, prefill_rows &rows)
{
    const gpu_params &p = a.p;
    gpu_request request = request_of_row_tile(item.row_tile);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        rows.first[i] = INT32_MIN;
        rows.last[i] = INT32_MAX;
        rows.position[i] = 0;
        rows.slope[i] = 0.0f;
        if (row + 8 * i < item.row_tile.num_rows) {
            prefill_row at = split_row(a, row + 8 * i);
            gpu_interval v = visible_to(p, request, item.first_query + at.query);
            rows.first[i] = v.first;
            rows.last[i] = v.last;
            rows.position[i] = v.position;
            if (p.problem.slopes != nullptr) {
                rows.slope[i] =
                    -p.problem.slopes[item.work.head * p.problem.group + at.head] * LOG2E;
            }
        }
    }
}

/* Tree masks and biases between the step's own tokens, from key `start` on. */
template <int N>
static __device__ __forceinline__ void add_tree(const prefill_params &a, const prefill_item &item,
                                                int32_t row, int32_t key, float (&s)[N])
{
    const gpu_params &p = a.p;
    int32_t start = item.row_tile.length - item.row_tile.query_len;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (row + 8 * r >= item.row_tile.num_rows) {
            continue;
        }
        int32_t index = item.first_query + split_row(a, row + 8 * r).query;
        int64_t at = item.row_tile.request * p.problem.tree_request + index * p.problem.tree_row;
        const uint32_t *bits = (const uint32_t *)p.problem.tree + at;
#pragma unroll
        for (int i = 2 * r; i < N; i += (i & 1) ? 3 : 1) {
            int32_t column = key + (i >> 2) * 8 + (i & 1) - start;
            keep_order_of_loads(); /* one load at a time: registers are few */
            if (column < 0 || column >= item.row_tile.query_len) {
                continue;
            }
            if (p.problem.tree_mask == ATTN_TREE_BITS) {
                s[i] = bits[column / 32] >> (column % 32) & 1 ? s[i] : -INFINITY;
            } else {
                float bias = __uint_as_float(bits[column]);
                s[i] = bias == -INFINITY ? -INFINITY : s[i] + LOG2E * bias;
            }
        }
    }
}

/* Raw products become scores in base 2. `key`: the lane's first. */
template <int N>
static __device__ __forceinline__ void add_terms(const prefill_params &a, const prefill_item &item,
                                                 const prefill_rows &rows, int32_t row, int32_t key,
                                                 float (&s)[N])
{
    const gpu_params &p = a.p;
    if (p.problem.soft_cap > 0.0f) {
        float in = p.problem.scale / p.problem.soft_cap, out = p.problem.soft_cap * LOG2E;
#pragma unroll
        for (int i = 0; i < N; i++) {
            s[i] = out * fast_tanh(s[i] * in);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            s[i] *= p.problem.scale * LOG2E;
        }
    }
    if (p.problem.alibi != ATTN_ALIBI_NONE) {
        bool root = p.problem.alibi == ATTN_ALIBI_SQRT;
#pragma unroll
        for (int i = 0; i < N; i++) {
            int r = (i >> 1) & 1;
            float distance = (float)(rows.position[r] - key) - (float)((i >> 2) * 8 + (i & 1));
            distance = root ? fast_sqrt(fmaxf(distance, 0.0f)) : fabsf(distance);
            s[i] = fmaf(rows.slope[r], distance, s[i]);
        }
    }
    if (p.problem.tree != nullptr &&
        key + 2 * N > item.row_tile.length - item.row_tile.query_len) { /* 2 N keys are one tile */
        add_tree(a, item, row, key, s);
    }
}

/* Keys that a row does not see become -inf, a NaN too. `key`: the lane's first; `base`: the tile's.
 */
template <int N>
static __device__ __forceinline__ void mask_tile(const prefill_rows &rows, int32_t base,
                                                 int32_t key, float (&s)[N])
{
    int32_t end = base + 2 * N - 1;
    bool inside = rows.first[0] <= base && rows.last[0] >= end && rows.first[1] <= base &&
                  rows.last[1] >= end;
    if (__all_sync(0xffffffffu, inside)) {
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        int r = (i >> 1) & 1;
        int32_t j = key + (i >> 2) * 8 + (i & 1);
        s[i] = j >= rows.first[r] && j <= rows.last[r] ? s[i] : -INFINITY;
    }
}

/* Scores become weights; f: what sums so far shrink by. Scores times `scale` are in base 2. */
template <int N>
static __device__ __forceinline__ void soften(float scale, float (&s)[N], float (&m)[2],
                                              float (&l)[2], float (&f)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float high = m[r];
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            high = fmaxf(high, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
        }
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
        float base = high == -INFINITY ? 0.0f : __fmul_rn(high, scale), sum = 0.0f;
        f[r] = fast_exp2(__fmul_rn(m[r], scale) - base); /* 1 where the maximum stays */
        m[r] = high;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            float x = fast_exp2(fmaf(s[4 * i + 2 * r], scale, -base));
            float y = fast_exp2(fmaf(s[4 * i + 2 * r + 1], scale, -base));
            s[4 * i + 2 * r] = x;
            s[4 * i + 2 * r + 1] = y;
            sum += x + y;
        }
        l[r] = fmaf(l[r], f[r], sum);
    }
}

#endif
