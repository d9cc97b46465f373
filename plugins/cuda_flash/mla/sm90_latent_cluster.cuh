/* SPDX-License-Identifier: Apache-2.0 */
/* The merge of an item's parts by the cluster that has computed them: each CTA gets the others'
 * sums of an equal part of the dims in its shared memory, and writes these dims. A part of 64 rows
 * has 128 KiB, of which a CTA of n sends and receives (n - 1) / n. */
#ifndef CUDA_FLASH_SM90_LATENT_CLUSTER_CUH
#define CUDA_FLASH_SM90_LATENT_CLUSTER_CUH

#include "cuda_flash/ptx/sm90_cluster.cuh"
#include "sm90_latent_convert.cuh"

#define LATENT_CLUSTER 8 /* CTAs, at most */
#define LATENT_PART_BYTES (SM90_LATENT_ROWS * LATENT_MAX_RANK * 4)

/* row_max and row_sum of each CTA's part: the queries' rope column, after the places of scales. */
GPU_INLINE float2 *stats_of_parts(latent_shared &smem)
{
    static_assert(LATENT_CLUSTER * SM90_LATENT_ROWS * sizeof(float2) <= LATENT_COLUMN_BYTES / 2,
                  "half a column");
    return (float2 *)(smem.q[LATENT_ROPE] + LATENT_COLUMN_BYTES / 2);
}

GPU_INLINE void init_cluster_barriers(latent_shared &smem)
{
    const int warps = 8 * (int)cluster_size();
    barrier_init(shared_address(&smem.tiles_done), warps);
    barrier_init(shared_address(&smem.parts_full), warps);
    barrier_init(shared_address(&smem.parts_read), 8);
}

/* Where 32 dims of a warp group's part from CTA `from` lie in the CTA that gets them, its number
 * `at` of those; a thread has each 16 bytes of 128. */
GPU_INLINE uint32_t place_of_part(latent_shared &smem, uint32_t from, int half, uint32_t at)
{
    static_assert(LATENT_PART_BYTES <= sizeof smem.k, "the buffers hold the parts");
    const uint32_t each = LATENT_PART_BYTES / cluster_size();
    return shared_address(smem.k) + from * each + half * (each / 2) + at * 8192 +
           (threadIdx.x & 127) * 16;
}

/* Merges the parts; acc_o, row_max and row_sum become the item's. Of its warp group's half a CTA
 * gets the 32-dim pieces from the returned number on, 8 / cluster_size() of them. */
template <class ROWS>
GPU_INLINE uint32_t merge_in_cluster(latent_shared &smem, int turn, int half, ROWS &r,
                                     float (&acc_o)[128])
{
    const uint32_t rank = cluster_rank(), size = cluster_size(), each = 8 / size;
    const int lane = threadIdx.x & 31;
    const float2 *stats = stats_of_parts(smem);
    if (half == 0 && (lane & 3) == 0) {
#pragma unroll 1
        for (uint32_t to = 0; to < size; to++) {
            const uint32_t at = shared_address(stats + rank * SM90_LATENT_ROWS + r.row);
            const uint32_t remote = remote_address(at, to);
            store_remote8(remote, r.row_max[0], r.row_sum[0]);
            store_remote8(remote + 8 * (uint32_t)sizeof(float2), r.row_max[1], r.row_sum[1]);
        }
    }
    arrive_warp_at_all(smem.tiles_done);
    barrier_wait_cluster(shared_address(&smem.tiles_done), turn);
    float scores_scale[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float row_max = -INFINITY, row_sum = 0.0f;
#pragma unroll 1
        for (uint32_t from = 0; from < size; from++) {
            row_max = fmaxf(row_max, stats[from * SM90_LATENT_ROWS + r.row + 8 * h].x);
        }
        const float base = softmax_base(row_max);
#pragma unroll 1
        for (uint32_t from = 0; from < size; from++) {
            const float2 part = stats[from * SM90_LATENT_ROWS + r.row + 8 * h];
            row_sum = fmaf(exp2f(part.x - base), part.y, row_sum);
        }
        scores_scale[h] = exp2f(r.row_max[h] - base);
        r.row_max[h] = row_max;
        r.row_sum[h] = row_sum;
    }
#pragma unroll
    for (int i = 0; i < 128; i++) {
        acc_o[i] *= scores_scale[(i >> 1) & 1];
    }
#pragma unroll
    for (uint32_t k = 0; k < 8; k++) {
        const uint32_t to = k / each;
        if (to != rank) {
            const uint32_t remote =
                remote_address(place_of_part(smem, rank, half, k - to * each), to);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *x = &acc_o[16 * k + 4 * i];
                store_remote16(remote + i * 2048, x[0], x[1], x[2], x[3]);
            }
        }
    }
    arrive_warp_at_all(smem.parts_full);
    barrier_wait_cluster(shared_address(&smem.parts_full), turn);
#pragma unroll
    for (uint32_t k = 0; k < 8; k++) {
        if (k / each != rank) {
            continue;
        }
#pragma unroll 1
        for (uint32_t n = 1; n < size; n++) {
            const uint32_t from = place_of_part(smem, (rank + n) % size, half, k - rank * each);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint4 x = load16(from + i * 2048);
                acc_o[16 * k + 4 * i] += __uint_as_float(x.x);
                acc_o[16 * k + 4 * i + 1] += __uint_as_float(x.y);
                acc_o[16 * k + 4 * i + 2] += __uint_as_float(x.z);
                acc_o[16 * k + 4 * i + 3] += __uint_as_float(x.w);
            }
        }
    }
    arrive_warp(smem.parts_read);
    return rank * each;
}

#endif
