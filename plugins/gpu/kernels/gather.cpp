/* SPDX-License-Identifier: Apache-2.0 */
/* gather_kv, and conversion of queries to 16 bits: a warp for each (row, head). The limit is memory
 * bandwidth. */
#include "gpu/device/rows.h"
#include "gpu/device/search.h"

GPU_DEVICE void gather_turned(const gpu_gather_params &p, const gpu_cache_row &from, int32_t head,
                              char *to, int lane)
{
    float x[LANE_DIMS], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        int32_t d = i * GPU_LANES + lane;
        x[i] = d < p.from.head_size ? row_element<true>(p.from, from, head, d) : 0.0f;
        squares += x[i] * x[i];
    }
    turn_back(p.from, x, lane);
    float scale = row_scale<true>(p.from, from);
    squares = warp_sum(squares);
    scale = p.from.form == GPU_ROW_LEVELS ? scale / sqrtf(squares) : scale;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        if (i * GPU_LANES + lane < p.from.head_size) {
            number_store(to, p.to.dtype, i * GPU_LANES + lane, x[i] * scale);
        }
    }
}

/* Rows out_start[r] .. out_start[r + 1] - 1 are keys first_key[r] .. of request r. The number of
 * rows is known only on the device. */
template <bool NIBBLES> GPU_INLINE void gather_rows(const gpu_gather_params &p)
{
    int32_t begin = p.out_start[0];
    int64_t items = (int64_t)(p.out_start[p.num_reqs] - begin) * p.num_heads;
    int lane = lane_index();
    for (int64_t i = warp_of_grid(GPU_THREADS_gather); i < items;
         i += warps_of_grid(GPU_THREADS_gather)) {
        int32_t row = begin + (int32_t)(i / p.num_heads), head = (int32_t)(i % p.num_heads);
        int32_t r = find_last(p.out_start, p.num_reqs, row);
        int32_t j = (p.first_key != nullptr ? p.first_key[r] : 0) + row - p.out_start[r];
        int64_t table_row = p.block_table_row != nullptr ? p.block_table_row[r] : r;
        int32_t index = j / p.block_size, slot = j - index * p.block_size;
        int64_t block = p.block_table[table_row * p.block_table_stride + index];
        gpu_cache_row from = enter_row<NIBBLES>(p.from, block, slot, head);
        char *to = p.to.data + row * p.to.row + head * p.to.head;
        if (NIBBLES && is_turned(p.from)) {
            gather_turned(p, from, head, to, lane);
            continue;
        }
        float scale = row_scale<NIBBLES>(p.from, from);
        for (int32_t d = lane; d < p.from.head_size; d += GPU_LANES) {
            float x = row_element<NIBBLES>(p.from, from, head, d);
            number_store(to, p.to.dtype, d, x * scale);
        }
    }
}

GPU_KERNEL(gather, gpu_gather_params)
{
    gather_rows<false>(p);
}

GPU_KERNEL(gather_nibbles, gpu_gather_params)
{
    gather_rows<true>(p);
}

GPU_KERNEL(widen, gpu_widen_params)
{
    int32_t begin = p.query_start[0], rows = min(p.query_start[p.num_reqs], p.num_rows) - begin;
    int64_t items = (int64_t)rows * p.heads;
    int lane = lane_index();
    for (int64_t i = warp_of_grid(GPU_THREADS_widen); i < items;
         i += warps_of_grid(GPU_THREADS_widen)) {
        int64_t row = begin + i / p.heads, head = i % p.heads;
        const char *from = p.from.data + row * p.from.row + head * p.from.head;
        char *to = p.to.data + row * p.to.row + head * p.to.head;
        for (int32_t d = lane; d < p.dims; d += GPU_LANES) {
            number_store(to, p.to.dtype, d, number_load(from, p.from.dtype, d));
        }
    }
}
