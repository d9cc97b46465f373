/* SPDX-License-Identifier: Apache-2.0 */
/* The end of an item: rows are divided by their sums and written. Rows that came out as no numbers
 * are computed again, key by key: a weight of 0 may have met a NaN of a key that they do not see.
 */
#ifndef CUDA_FLASH_SM90_FINISH_CUH
#define CUDA_FLASH_SM90_FINISH_CUH

#include "gpu/device/number.h"
#include "sm90_score.cuh"

struct prefill_out {
    char *data;
    float *lse;
    float sink; /* base 2; -inf: none */
};

static __device__ __forceinline__ prefill_out out_of_row(const prefill_params &a,
                                                         const prefill_item &item, int32_t row)
{
    const gpu_params &p = a.p;
    prefill_row at = split_row(a, row);
    int64_t token = item.row_tile.query_start + item.first_query + at.query;
    int32_t head = item.work.head * p.problem.group + at.head;
    prefill_out v;
    v.data = p.out.data + token * p.out.row + head * p.out.head;
    v.lse = p.lse.data != nullptr ? p.lse.data + head * p.lse.head + token * p.lse.row : nullptr;
    v.sink = p.problem.sinks != nullptr ? p.problem.sinks[head] * LOG2E : -INFINITY;
    return v;
}

template <int KIND> static __device__ __forceinline__ float number_at(const char *row, int32_t d)
{
    if constexpr (KIND == KIND_BF16) {
        return __bfloat162float(((const __nv_bfloat16 *)row)[d]);
    }
    return __half2float(((const __half *)row)[d]);
}

template <int KIND> static __device__ __forceinline__ void put_number(char *row, int32_t d, float x)
{
    if constexpr (KIND == KIND_BF16) {
        ((__nv_bfloat16 *)row)[d] = __float2bfloat16_rn(x);
    } else {
        ((__half *)row)[d] = __float2half_rn(x);
    }
}

/* Where K or V of a key lies. */
static __device__ __forceinline__ const char *row_of_key(const gpu_params &p, const gpu_cache &c,
                                                         const prefill_item &item, int32_t j)
{
    const char *at = c.data + item.work.head * c.head;
    if (!p.problem.paged) {
        return at + (item.row_tile.key_start + j) * c.block;
    }
    int32_t index = j / p.problem.block_size;
    int64_t block = p.problem.block_table[item.row_tile.table + index];
    return at + block * c.block + (j - index * p.problem.block_size) * c.slot;
}

/* Score of one key in base 2, -inf where a tree hides it. */
static __device__ __forceinline__ float score_of(const gpu_params &p, const prefill_item &item,
                                                 int32_t index, int32_t position, float slope,
                                                 float product, int32_t j)
{
    float s = product * p.problem.scale;
    s = p.problem.soft_cap > 0.0f ? p.problem.soft_cap * tanhf(s / p.problem.soft_cap) : s;
    float bias = bias_of(p.problem, request_of_row_tile(item.row_tile), index, position, slope, j);
    s = bias == -INFINITY ? -INFINITY : LOG2E * (s + bias); /* NaN of a hidden key too */
    int32_t column = j - (item.row_tile.length - item.row_tile.query_len);
    if (p.problem.tree_mask == ATTN_TREE_BITS && p.problem.tree != nullptr && column >= 0) {
        const uint32_t *bits = (const uint32_t *)p.problem.tree +
                               item.row_tile.request * p.problem.tree_request +
                               index * p.problem.tree_row;
        s = bits[column / 32] >> (column % 32) & 1 ? s : -INFINITY;
    }
    return s;
}

/* One row by one warp: a pass over its keys for their sum, then one for each 128 dims of values.
 * Products of weight 0 are left out. */
template <class S>
static __device__ __forceinline__ void exact_row(const prefill_params &a, const prefill_item &item,
                                                 int32_t row)
{
    const gpu_params &p = a.p;
    constexpr int own = (S::dv < 128 ? S::dv : 128) / 32;
    const int lane = threadIdx.x & 31;
    prefill_row at = split_row(a, row);
    int32_t index = item.first_query + at.query, head = item.work.head * p.problem.group + at.head;
    gpu_interval v = visible_to(p, request_of_row_tile(item.row_tile), index);
    const char *q =
        p.q.data + (int64_t)(item.row_tile.query_start + index) * p.q.row + head * p.q.head;
    float slope = p.problem.slopes != nullptr ? p.problem.slopes[head] : 0.0f;
    prefill_out out = out_of_row(a, item, row);
    float high = -INFINITY, sum = 0.0f, factor = 0.0f;
#pragma unroll 1
    for (int32_t first = -32 * own; first < p.problem.head_size_v; first += 32 * own) {
        float o[own];
#pragma unroll
        for (int i = 0; i < own; i++) {
            o[i] = 0.0f;
        }
#pragma unroll 1
        for (int32_t base = v.first; base <= v.last; base += 32) {
            float x = -INFINITY;
            if (base + lane <= v.last) {
                const char *k = row_of_key(p, p.k, item, base + lane);
                float product = 0.0f;
#pragma unroll 1
                for (int32_t d = 0; d < p.problem.head_size; d++) {
                    product += number_at<S::kind>(q, d) * number_at<S::kind>(k, d);
                }
                x = score_of(p, item, index, v.position, slope, product, base + lane);
            }
            if (first < 0) {
                float most = fmaxf(high, x);
#pragma unroll
                for (int d = 16; d > 0; d >>= 1) {
                    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
                }
                float from = softmax_base(most);
                sum = sum * exp2f(high - from) + exp2f(x - from); /* of this lane's keys */
                high = most;
                continue;
            }
            float weight = exp2f(x - softmax_base(high));
#pragma unroll 1
            for (int t = 0; t < 32 && base + t <= v.last; t++) {
                float w = __shfl_sync(0xffffffffu, weight, t);
                if (w == 0.0f) {
                    continue;
                }
                const char *value = row_of_key(p, p.v, item, base + t);
#pragma unroll
                for (int i = 0; i < own; i++) {
                    int32_t d = first + lane + 32 * i;
                    o[i] += d < p.problem.head_size_v ? w * number_at<S::kind>(value, d) : 0.0f;
                }
            }
        }
        if (first < 0) {
#pragma unroll
            for (int d = 16; d > 0; d >>= 1) {
                sum += __shfl_xor_sync(0xffffffffu, sum, d);
            }
            factor = softmax_close_base2(out.sink, high, sum, lane == 0 ? out.lse : nullptr);
            continue;
        }
#pragma unroll
        for (int i = 0; i < own; i++) {
            int32_t d = first + lane + 32 * i;
            if (d < p.problem.head_size_v) {
                put_number<S::kind>(out.data, d, o[i] * factor);
            }
        }
    }
}

/* The four lanes of a row have a word each of four chunks of 16 bytes; after this each has one
 * chunk: that of its number. */
static __device__ __forceinline__ void turn_chunks(uint32_t (&w)[4], int lane)
{
    uint32_t a = lane & 1 ? w[0] : w[1], b = lane & 1 ? w[2] : w[3];
    a = __shfl_xor_sync(0xffffffffu, a, 1);
    b = __shfl_xor_sync(0xffffffffu, b, 1);
    if (lane & 1) {
        w[0] = a, w[2] = b;
    } else {
        w[1] = a, w[3] = b;
    }
    a = lane & 2 ? w[0] : w[2], b = lane & 2 ? w[1] : w[3];
    a = __shfl_xor_sync(0xffffffffu, a, 2);
    b = __shfl_xor_sync(0xffffffffu, b, 2);
    if (lane & 2) {
        w[0] = a, w[1] = b;
    } else {
        w[2] = a, w[3] = b;
    }
}

/* Rows `row` and row + 8 of this lane; m is in base 2. */
template <class S>
static __device__ __forceinline__ void
finish_item(const prefill_params &a, const prefill_item &item, int32_t row, const float (&m)[2],
            const float (&l)[2], const float (&o)[S::dv / 2])
{
    const gpu_params &p = a.p;
    const int lane = threadIdx.x & 31;
    uint32_t bad[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = l[r], odd = 0.0f, factor = 0.0f;
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        bool is_there = row + 8 * r < item.row_tile.num_rows;
        prefill_out out = {nullptr, nullptr, -INFINITY};
        if (is_there) {
            out = out_of_row(a, item, row + 8 * r);
            factor = softmax_close_base2(out.sink, m[r], sum, (lane & 3) == 0 ? out.lse : nullptr);
        }
#pragma unroll
        for (int n = 0; n < S::dv / 8; n += 4) {
            uint32_t w[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float x = o[4 * (n + c) + 2 * r], y = o[4 * (n + c) + 2 * r + 1];
                odd = fmaf(x, 0.0f, odd);
                odd = fmaf(y, 0.0f, odd);
                w[c] = pack2<S::kind>(x * factor, y * factor);
            }
            turn_chunks(w, lane);
            int32_t d = (n + (lane & 3)) * 8;
            if (is_there && d < p.problem.head_size_v) {
                if (a.wide_rows) {
                    *(uint4 *)(out.data + d * 2) = make_uint4(w[0], w[1], w[2], w[3]);
                } else {
#pragma unroll
                    for (int c = 0; c < 8; c++) {
                        ((uint16_t *)out.data)[d + c] = (uint16_t)(w[c / 2] >> (c & 1) * 16);
                    }
                }
            }
        }
        bad[r] = __ballot_sync(0xffffffffu, is_there && odd != 0.0f); /* NaN is not 0 */
    }
    if ((bad[0] | bad[1]) == 0) {
        return;
    }
    __syncwarp(); /* what is written again comes second */
#pragma unroll 1
    for (int i = 0; i < 16; i++) {
        uint32_t lanes = (i < 8 ? bad[0] : bad[1]) >> (i & 7) * 4;
        if ((lanes & 15) != 0) {
            exact_row<S>(a, item, row - (lane >> 2) + i);
        }
    }
}

#endif
