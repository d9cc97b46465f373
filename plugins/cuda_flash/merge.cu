/* SPDX-License-Identifier: Apache-2.0 */
/* merge_states and gather_kv: a warp per (row, head). The limit of both is memory. */
#include "launch.h"
#include "rows.cuh"

static __device__ __forceinline__ float side_number(const flash_rows &side, int64_t t, int64_t h,
                                                    float weight, int32_t d)
{
    return weight == 0.0f
               ? 0.0f
               : weight * number_load(side.data + t * side.row + h * side.head, side.dtype, d);
}

static __global__ void __launch_bounds__(128)
    merge_states(const __grid_constant__ flash_merge_params p)
{
    int64_t items = p.num_rows * p.heads;
    int lane = threadIdx.x & 31;
    float scale = p.out_scale != nullptr ? *p.out_scale : 1.0f;
    number_divisor by = divisor_of(scale);
    for (int64_t i = blockIdx.x * 4 + (threadIdx.x >> 5); i < items; i += (int64_t)gridDim.x * 4) {
        int64_t t = p.first_row + i / p.heads, h = i % p.heads;
        /* past these rows the prefix may have no memory at all */
        float a = t - p.first_row < p.num_rows_with_prefix
                      ? p.prefix_lse.data[h * p.prefix_lse.head + t * p.prefix_lse.row]
                      : -INFINITY;
        float b = p.suffix_lse.data[h * p.suffix_lse.head + t * p.suffix_lse.row];
        a = isinf(a) ? -INFINITY : a;
        b = isinf(b) ? -INFINITY : b;
        float m = fmaxf(a, b), base = m == -INFINITY ? 0.0f : m;
        float wa = expf(a - base), wb = expf(b - base), sum = wa + wb;
        __syncwarp(); /* lse may be one of the inputs: all lanes have read it */
        for (int32_t d = lane; d < p.dims; d += 32) {
            float x = side_number(p.prefix, t, h, wa, d) + side_number(p.suffix, t, h, wb, d);
            x = sum == 0.0f ? 0.0f : x / sum;
            number_store(p.out.data + t * p.out.row + h * p.out.head, p.out.dtype, d,
                         p.out_scale != nullptr ? divide_odd(x, by) : x);
        }
        if (lane == 0 && p.lse.data != nullptr) {
            p.lse.data[h * p.lse.head + t * p.lse.row] = sum == 0.0f ? -INFINITY : base + logf(sum);
        }
    }
}

cudaError_t launch_merge(const void *params, int32_t num_sms, cudaStream_t stream)
{
    if (params == nullptr) {
        return load_kernel(merge_states);
    }
    const flash_merge_params &p = *(const flash_merge_params *)params;
    if (p.num_rows > 0 && p.heads > 0) {
        merge_states<<<grid_for(p.num_rows * p.heads, 4, (int64_t)num_sms * 16), 128, 0, stream>>>(
            p);
    }
    return cudaGetLastError();
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
        const char *from = row_at(p.from, block, slot, head);
        float scale = row_scale_of(p.from, block, slot, head);
        char *to = p.to.data + row * p.to.row + head * p.to.head;
        for (int32_t d = lane; d < p.from.head_size; d += 32) {
            number_store(to, p.to.dtype, d, row_element(p.from, from, head, d) * scale);
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
