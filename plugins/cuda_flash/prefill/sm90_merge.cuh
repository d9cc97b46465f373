/* SPDX-License-Identifier: Apache-2.0 */
/* Merges the parts of cut prefill items in their order. A CTA has 16 rows of an item and 16 lanes
 * for each row. */
#ifndef CUDA_FLASH_SM90_MERGE_CUH
#define CUDA_FLASH_SM90_MERGE_CUH

#include "sm90_epilogue.cuh"

#define MERGE_ROWS 16
#define MERGE_THREADS 256

/* Merges 8 dims of a row, starting with d, from the parts that begin at `first`. */
template <int KIND>
static __device__ __forceinline__ void merge_dims(const prefill_params &a, int32_t first,
                                                  int32_t parts, int32_t row, int32_t d, float base,
                                                  float factor, char *to)
{
    const int32_t size = a.p.problem.head_size_v;
    float x[8] = {};
#pragma unroll 4
    for (int32_t i = 0; i < parts; i++) {
        int64_t at = (int64_t)(first + i) * PREFILL_ROWS + row;
        float weight = exp2f(a.part_lse[at] * LOG2E - base);
        const uint4 w = *(const uint4 *)(a.parts + (at * a.size_v + d) * 2);
        const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int e = 0; e < 8; e++) { /* a part without visible keys holds undefined values */
            x[e] += weight == 0.0f ? 0.0f : weight * load_number<KIND>((const char *)words, e);
        }
    }
    if (a.wide_rows != 0 && d + 8 <= size) {
        *(uint4 *)(to + d * 2) = make_uint4(
            pack2<KIND>(x[0] * factor, x[1] * factor), pack2<KIND>(x[2] * factor, x[3] * factor),
            pack2<KIND>(x[4] * factor, x[5] * factor), pack2<KIND>(x[6] * factor, x[7] * factor));
        return;
    }
#pragma unroll
    for (int e = 0; e < 8; e++) {
        if (d + e < size) {
            store_number<KIND>(to, d + e, x[e] * factor);
        }
    }
}

template <int KIND>
static __global__ void __launch_bounds__(MERGE_THREADS)
    merge_parts(const __grid_constant__ prefill_params a)
{
    const int32_t first = (int32_t)blockIdx.x, lane = threadIdx.x & 15;
    const int32_t row = blockIdx.y * MERGE_ROWS + (threadIdx.x >> 4);
    wait_for_earlier_kernels();
    let_later_kernels_begin();
    if (first >= a.header->items) {
        return;
    }
    const prefill_item &item = a.items[first];
    const int32_t parts = item.parts;
    if (parts == 0 || row >= item.row_tile.num_rows) {
        return;
    }
    float high = -INFINITY, sum = 0.0f;
#pragma unroll 4
    for (int32_t i = 0; i < parts; i++) {
        high = fmaxf(high, a.part_lse[(int64_t)(first + i) * PREFILL_ROWS + row] * LOG2E);
    }
    const float base = softmax_base(high);
#pragma unroll 4
    for (int32_t i = 0; i < parts; i++) {
        sum += exp2f(a.part_lse[(int64_t)(first + i) * PREFILL_ROWS + row] * LOG2E - base);
    }
    prefill_out out = out_of_item(a, item, row);
    float factor = softmax_close_base2(out.sink, high, sum, lane == 0 ? out.lse : nullptr);
#pragma unroll 1
    for (int32_t d = lane * 8; d < a.p.problem.head_size_v; d += 128) {
        merge_dims<KIND>(a, first, parts, row, d, base, factor, out.data);
    }
}

#endif
