/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule, made on the device from the lengths as they are there: how many key tiles each
 * (request, row tile) has, as running sums. One CTA. */
#include <cuda_runtime.h>

#include "visible.cuh"

#define PLAN_THREADS 1024

/* Sum of the values of the threads before this one, plus `carry`, which becomes the new total. */
static __device__ int32_t running_sum(int32_t value, int32_t *carry, int32_t *warps)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int32_t sum = value;
    for (int d = 1; d < 32; d <<= 1) {
        int32_t other = __shfl_up_sync(0xffffffffu, sum, d);
        sum += lane >= d ? other : 0;
    }
    if (lane == 31) {
        warps[warp] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        int32_t w = warps[lane], all = w;
        for (int d = 1; d < 32; d <<= 1) {
            int32_t other = __shfl_up_sync(0xffffffffu, all, d);
            all += lane >= d ? other : 0;
        }
        warps[lane] = all;
    }
    __syncthreads();
    int32_t before = *carry + sum - value + (warp > 0 ? warps[warp - 1] : 0);
    *carry += warps[31];
    __syncthreads();
    return before;
}

static __global__ void __launch_bounds__(PLAN_THREADS) plan(const __grid_constant__ flash_params p)
{
    __shared__ int32_t warps[32];
    int32_t pairs = 0, total = 0;
    for (int32_t first = 0; first < p.num_reqs; first += PLAN_THREADS) {
        int32_t r = first + threadIdx.x, tiles = 0;
        if (r < p.num_reqs) {
            int32_t rows = (p.query_start[r + 1] - p.query_start[r]) * p.group;
            tiles = (rows + p.row_tile - 1) / p.row_tile;
        }
        int32_t start = running_sum(tiles, &pairs, warps);
        if (r < p.num_reqs) {
            p.tile_start[r] = start;
        }
    }
    __syncthreads();
    for (int32_t first = 0; first < pairs; first += PLAN_THREADS) {
        int32_t pair = first + threadIdx.x, tiles = 0;
        if (pair < pairs) {
            int32_t low = 0, high = p.num_reqs - 1;
            while (low < high) {
                int32_t middle = (low + high + 1) >> 1;
                if (p.tile_start[middle] <= pair) {
                    low = middle;
                } else {
                    high = middle - 1;
                }
            }
            flash_request q = load_request(p, low);
            int32_t row = (pair - p.tile_start[low]) * p.row_tile, k0, k1;
            key_range(p, q, row, min(row + p.row_tile, q.query_len * p.group), &k0, &k1);
            tiles = (k1 - (k0 & ~(FLASH_TILE - 1)) + FLASH_TILE - 1) / FLASH_TILE;
            tiles = max(tiles, 1) * p.num_kv_heads;
            p.pair_req[pair] = low;
        }
        int32_t start = running_sum(tiles, &total, warps);
        if (pair < pairs) {
            p.pair_start[pair] = start;
        }
    }
    for (int32_t i = threadIdx.x; i < pairs * p.num_kv_heads; i += PLAN_THREADS) {
        p.arrived[i] = 0;
    }
    if (threadIdx.x == 0) {
        p.pair_start[pairs] = total;
        p.header[0] = total;
        p.header[1] = pairs;
    }
}

cudaError_t launch_plan(const struct flash_params *p, cudaStream_t stream)
{
    if (p != nullptr) {
        plan<<<1, PLAN_THREADS, 0, stream>>>(*p);
        return cudaGetLastError();
    }
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, plan);
}
