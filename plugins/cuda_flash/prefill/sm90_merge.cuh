/* SPDX-License-Identifier: Apache-2.0 */
/* Merges the parts of cut prefill items in their order. The CTA of a part merges its share of the
 * item's rows, with 16 lanes for each row. Latency is the limit, so loads do not wait for others.
 */
#ifndef CUDA_FLASH_SM90_MERGE_CUH
#define CUDA_FLASH_SM90_MERGE_CUH

#include "sm90_epilogue.cuh"

#define MERGE_THREADS 256
#define MERGE_STEP 8 /* parts of a row that are loaded together */

/* Merges 8 dims of a row, starting with d, from `parts` parts that begin at `first`. */
template <int KIND>
GPU_INLINE void merge_dims(const prefill_params &a, const prefill_item &item, int32_t first,
                           int32_t parts, int32_t row, int32_t d)
{
    const int32_t size = a.p.problem.head_size_v;
    const prefill_out out = out_of_item(a, item, row);
    float x[8] = {}, high = -INFINITY, sum = 0.0f;
#pragma unroll 1
    for (int32_t from = 0; from < parts; from += MERGE_STEP) {
        float lse[MERGE_STEP];
        uint4 w[MERGE_STEP];
#pragma unroll
        for (int i = 0; i < MERGE_STEP; i++) {
            const bool is_there = from + i < parts;
            const int64_t at = (int64_t)(first + from + i) * PREFILL_ROWS + row;
            lse[i] = is_there ? a.part_lse[at] * LOG2E : -INFINITY;
            w[i] = is_there ? *(const uint4 *)(a.parts + (at * a.size_v + d) * 2)
                            : make_uint4(0, 0, 0, 0);
        }
        const float before = high;
#pragma unroll
        for (int i = 0; i < MERGE_STEP; i++) {
            high = fmaxf(high, lse[i]);
        }
        const float base = softmax_base(high), scores_scale = exp2f(before - base);
        sum *= scores_scale;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            x[e] *= scores_scale;
        }
#pragma unroll
        for (int i = 0; i < MERGE_STEP; i++) {
            const float weight = exp2f(lse[i] - base);
            const uint32_t words[4] = {w[i].x, w[i].y, w[i].z, w[i].w};
            sum += weight;
#pragma unroll
            for (int e = 0; e < 8; e++) { /* a part without visible keys holds undefined values */
                x[e] += weight == 0.0f ? 0.0f : weight * load_number<KIND>((const char *)words, e);
            }
        }
    }
    const float factor = softmax_close_base2(out.sink, high, sum, d == 0 ? out.lse : nullptr);
    if (a.wide_rows != 0 && d + 8 <= size) {
        *(uint4 *)(out.data + d * 2) = make_uint4(
            pack2<KIND>(x[0] * factor, x[1] * factor), pack2<KIND>(x[2] * factor, x[3] * factor),
            pack2<KIND>(x[4] * factor, x[5] * factor), pack2<KIND>(x[6] * factor, x[7] * factor));
        return;
    }
#pragma unroll
    for (int e = 0; e < 8; e++) {
        if (d + e < size) {
            store_number<KIND>(out.data, d + e, x[e] * factor);
        }
    }
}

template <int KIND>
static __global__ void __launch_bounds__(MERGE_THREADS)
    merge_parts(const __grid_constant__ prefill_params a)
{
    /* The schedule exists already: the kernel that computes the parts has started this one. */
    const int32_t index = (int32_t)blockIdx.x, items = a.header->items;
    const prefill_item &item = a.items[index];
    const int32_t part = item.parts >> 16, parts = item.parts & 0xffff;
    const int32_t rows = item.row_tile.num_rows;
    wait_for_earlier_kernels();
    let_later_kernels_begin();
    if (index >= items || parts == 0) {
        return;
    }
    const int32_t share = (rows + parts - 1) / parts, end = min((part + 1) * share, rows);
    const int32_t d = (threadIdx.x & 15) * 8;
#pragma unroll 1
    for (int32_t row = part * share + (threadIdx.x >> 4); row < end; row += MERGE_THREADS / 16) {
        if (d < a.p.problem.head_size_v) {
            merge_dims<KIND>(a, item, index - part, parts, row, d);
        }
    }
}

#endif
