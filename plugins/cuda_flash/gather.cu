/* SPDX-License-Identifier: Apache-2.0 */
/* gather_kv: a warp per (row, head). The limit is memory. */
#include "launch.h"
#include "rows.cuh"

static __device__ void gather_turned(const flash_gather_params &p, const flash_row &from,
                                     int32_t head, char *to, int lane)
{
    float x[LANE_DIMS];
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        int32_t d = i * 32 + lane;
        x[i] = d < p.from.head_size ? row_element(p.from, from, head, d) * from.scale : 0.0f;
    }
    turn_back(p.from, x, lane);
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        if (i * 32 + lane < p.from.head_size) {
            number_store(to, p.to.dtype, i * 32 + lane, x[i]);
        }
    }
}

/* Rows out_start[r] .. out_start[r + 1] - 1 are keys first_key[r] .. of request r. How many rows
 * there are stands on the device. */
static __global__ void __launch_bounds__(128)
    gather_kv(const __grid_constant__ flash_gather_params p)
{
    int32_t begin = p.out_start[0];
    int64_t items = (int64_t)(p.out_start[p.num_reqs] - begin) * p.num_heads;
    int lane = threadIdx.x & 31;
    for (int64_t i = blockIdx.x * 4 + (threadIdx.x >> 5); i < items; i += (int64_t)gridDim.x * 4) {
        int32_t row = begin + (int32_t)(i / p.num_heads), head = (int32_t)(i % p.num_heads);
        int32_t r = find_start(p.out_start, p.num_reqs, row);
        int32_t j = (p.first_key != nullptr ? p.first_key[r] : 0) + row - p.out_start[r];
        int64_t table_row = p.block_table_row != nullptr ? p.block_table_row[r] : r;
        int32_t index = j / p.block_size, slot = j - index * p.block_size;
        int64_t block = p.block_table[table_row * p.block_table_stride + index];
        flash_row from = enter_row(p.from, block, slot, head);
        char *to = p.to.data + row * p.to.row + head * p.to.head;
        if (p.from.form == FLASH_ROW_INT4) {
            gather_turned(p, from, head, to, lane);
            continue;
        }
        for (int32_t d = lane; d < p.from.head_size; d += 32) {
            number_store(to, p.to.dtype, d, row_element(p.from, from, head, d) * from.scale);
        }
    }
}

cudaError_t launch_gather(const void *params, int32_t num_sms, cudaStream_t stream)
{
    if (params == nullptr) {
        return load_kernel(gather_kv);
    }
    const flash_gather_params &p = *(const flash_gather_params *)params;
    if (p.num_reqs > 0) {
        gather_kv<<<num_sms * 16, 128, 0, stream>>>(p);
    }
    return cudaGetLastError();
}
