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
GPU_INLINE float2 *stats_of_parts(const latent_shared &smem)
{
    static_assert(LATENT_CLUSTER * SM90_LATENT_ROWS * sizeof(float2) <= LATENT_COLUMN_BYTES / 2,
                  "half a column");
    return (float2 *)(smem.q[LATENT_ROPE] + LATENT_COLUMN_BYTES / 2);
}

GPU_INLINE void init_cluster_barriers(latent_shared &smem)
{
    barrier_init(shared_address(&smem.item_full), 1);
    barrier_init(shared_address(&smem.tiles_done), 8 * (int)cluster_size());
    barrier_init(shared_address(&smem.parts_full), 1 + 8);
    barrier_init(shared_address(&smem.parts_read), 8);
}

/* A consumer warp has ended its tiles: other CTAs may send their parts. Its P in the buffers has
 * been read; an arrival with .release.cluster would wait for the device's memory. */
GPU_INLINE void end_tiles(latent_shared &smem)
{
    __syncwarp();
    if ((threadIdx.x & 31) < cluster_size()) {
        barrier_arrive_remote(remote_address(shared_address(&smem.tiles_done), threadIdx.x & 31));
    }
}

/* Where 32 dims of a warp group's part from CTA `from` lie in the CTA that gets them, its number
 * `at` of those; a thread has each 16 bytes of 128. */
GPU_INLINE uint32_t place_of_part(const latent_shared &smem, uint32_t from, int half, uint32_t at)
{
    static_assert(LATENT_PART_BYTES <= sizeof smem.k, "the buffers hold the parts");
    const uint32_t each = LATENT_PART_BYTES / cluster_size();
    return shared_address(smem.k) + from * each + half * (each / 2) + at * 8192 +
           (threadIdx.x & 127) * 16;
}

/* Sends all CTAs of the cluster their dims of this CTA's part; its own are stored. */
template <class ROWS>
GPU_INLINE void send_parts(latent_shared &smem, int half, const ROWS &r, const float (&acc_o)[128])
{
    const uint32_t rank = cluster_rank(), size = cluster_size(), each = 8 / size;
    const uint32_t full = shared_address(&smem.parts_full);
    if (half == 0 && (threadIdx.x & 127) == 0) {
        const int stats = (int)size * SM90_LATENT_ROWS * (int)sizeof(float2);
        barrier_arrive_expect(full, LATENT_PART_BYTES - LATENT_PART_BYTES / (int)size + stats);
    }
    if (half == 0 && (threadIdx.x & 3) == 0) {
#pragma unroll 1
        for (uint32_t to = 0; to < size; to++) {
            const uint32_t at = remote_address(
                shared_address(stats_of_parts(smem) + rank * SM90_LATENT_ROWS + r.row), to);
            const uint32_t barrier = remote_address(full, to);
            store_remote8(at, r.row_max[0], r.row_sum[0], barrier);
            store_remote8(at + 8 * (uint32_t)sizeof(float2), r.row_max[1], r.row_sum[1], barrier);
        }
    }
#pragma unroll
    for (uint32_t k = 0; k < 8; k++) {
        const uint32_t to = k / each, barrier = remote_address(full, to);
        const uint32_t place = place_of_part(smem, rank, half, k - to * each);
        const uint32_t at = remote_address(place, to);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *x = &acc_o[16 * k + 4 * i];
            store_near_or_remote16(to == rank, place + i * 2048, at + i * 2048, x, barrier);
        }
    }
    arrive_warp(smem.parts_full); /* the warp's own dims are stored */
}

/* The item's row_max and row_sum, of all parts. */
template <class ROWS> GPU_INLINE void merge_stats(const latent_shared &smem, ROWS &r)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float2 *stats = stats_of_parts(smem) + r.row + 8 * h;
        float row_max = -INFINITY, row_sum = 0.0f;
#pragma unroll 1
        for (uint32_t from = 0; from < cluster_size(); from++) {
            row_max = fmaxf(row_max, stats[from * SM90_LATENT_ROWS].x);
        }
        const float base = softmax_base(row_max);
#pragma unroll 1
        for (uint32_t from = 0; from < cluster_size(); from++) {
            const float2 part = stats[from * SM90_LATENT_ROWS];
            row_sum = fmaf(exp2f(part.x - base), part.y, row_sum);
        }
        r.row_max[h] = row_max;
        r.row_sum[h] = row_sum;
    }
}

/* Adds the parts in 32 dims, number `at` of this CTA's. */
template <class ROWS>
GPU_INLINE void merge_piece(const latent_shared &smem, int half, uint32_t at, const ROWS &r,
                            float (&acc_o)[16])
{
    const float2 *stats = stats_of_parts(smem) + r.row;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        acc_o[i] = 0.0f;
    }
#pragma unroll 1
    for (uint32_t from = 0; from < cluster_size(); from++) {
        const uint32_t place = place_of_part(smem, from, half, at);
        const float2 *part = stats + from * SM90_LATENT_ROWS;
        const float scales[2] = {exp2f(part[0].x - softmax_base(r.row_max[0])),
                                 exp2f(part[8].x - softmax_base(r.row_max[1]))};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 x = load16(place + i * 2048);
            acc_o[4 * i] = fmaf(scales[0], __uint_as_float(x.x), acc_o[4 * i]);
            acc_o[4 * i + 1] = fmaf(scales[0], __uint_as_float(x.y), acc_o[4 * i + 1]);
            acc_o[4 * i + 2] = fmaf(scales[1], __uint_as_float(x.z), acc_o[4 * i + 2]);
            acc_o[4 * i + 3] = fmaf(scales[1], __uint_as_float(x.w), acc_o[4 * i + 3]);
        }
    }
}

/* Stages 32 dims of a warp's 16 rows, in bf16: chunk c of row i lies at c ^ (i & 7), so that
 * neither stores nor loads conflict. */
GPU_INLINE void stage_piece(uint32_t stage, uint32_t row_bytes, uint32_t at, const float *acc_o,
                            const float (&factor)[2])
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        uint32_t two[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float *x = &acc_o[8 * i + 2 * n];
            two[n] = pack2<KIND_BF16>(x[0] * factor[n & 1], x[1] * factor[n & 1]);
        }
        const uint32_t chunk = 4 * at + 2 * i + (lane >> 4);
        store4(stage + (lane & 15) * row_bytes + (chunk ^ (lane & 7)) * 16, two);
    }
}

/* Writes 16 bytes to an address that is a multiple of 4 or of 2. */
static __device__ __noinline__ void write_narrow(char *to, uint4 x, bool by_words)
{
    const uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (by_words) {
            ((uint32_t *)to)[i] = w[i];
        } else {
            ((uint16_t *)to)[2 * i] = (uint16_t)w[i];
            ((uint16_t *)to)[2 * i + 1] = (uint16_t)(w[i] >> 16);
        }
    }
}

/* Writes an item's rows, or this CTA's dims of them, through shared memory that is free: a warp has
 * 16 rows in its half of the dims. Both warp groups have ended their tiles; a cluster's CTA has one
 * run, so that it needs its queries no more. */
template <class ROWS>
GPU_INLINE void write_item(const sm90_latent_params &a, latent_shared &smem, int turn, int half,
                           ROWS &r, const float (&acc_o)[128])
{
    const gpu_params &p = a.p.attend;
    const uint32_t size = cluster_size(), each = 8 / size, first = cluster_rank() * each;
    const int lane = threadIdx.x & 31, first_row = r.row & ~15;
    const int32_t num_rows = p.schedule.tile_rows;
    const int64_t token = smem.items[turn].token, head = smem.items[turn].head;
    float sink[2], factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const bool has = p.problem.sinks != nullptr && r.row + 8 * h < num_rows;
        sink[h] = has ? p.problem.sinks[head + r.row + 8 * h] * LOG2E : -INFINITY;
    }
    if (size > 1) {
        barrier_wait_cluster(shared_address(&smem.tiles_done), turn);
        send_parts(smem, half, r, acc_o);
        barrier_wait_cluster(shared_address(&smem.parts_full), turn);
        merge_stats(smem, r);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const bool writes_lse = half == 0 && (lane & 3) == 0 && first == 0 &&
                                p.lse.data != nullptr && r.row + 8 * h < num_rows;
        float *lse = &p.lse.data[(head + r.row + 8 * h) * p.lse.head + token * p.lse.row];
        factor[h] =
            softmax_close_base2(sink[h], r.row_max[h], r.row_sum[h], writes_lse ? lse : nullptr) *
            value_scale(p.k);
    }
    const uint32_t row_bytes = size > 1 ? 1024 / size : 512;
    const uint32_t stage =
        shared_address(size > 1 ? smem.q[0] : smem.k[0][0]) + (half * 64 + first_row) * row_bytes;
    if (size > 1) {
#pragma unroll 1
        for (uint32_t at = 0; at < each; at++) {
            float piece[16];
            merge_piece(smem, half, at, r, piece);
            stage_piece(stage, row_bytes, at, piece, factor);
        }
    } else {
#pragma unroll
        for (uint32_t at = 0; at < 8; at++) {
            stage_piece(stage, row_bytes, at, &acc_o[16 * at], factor);
        }
    }
    __syncwarp(); /* the warp's rows are written */
    const uint32_t chunks = 4 * each, chunk = lane & (chunks - 1);
    const int rows = min(16, num_rows - first_row);
    char *to = p.out.data + token * p.out.row + (head + first_row) * p.out.head + half * 512 +
               (4 * first + chunk) * 16;
#pragma unroll 4
    for (int i = lane / chunks; i < rows; i += 32 / chunks) {
        const uint4 x = load16(stage + i * row_bytes + (chunk ^ (i & 7)) * 16);
        if (a.wide_out == 8) {
            *(uint4 *)(to + i * p.out.head) = x;
        } else {
            write_narrow(to + i * p.out.head, x, a.wide_out == 2);
        }
    }
    arrive_warp(smem.parts_read);
}

#endif
