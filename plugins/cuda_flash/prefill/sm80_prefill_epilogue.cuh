/* SPDX-License-Identifier: Apache-2.0 */
/* The epilogue of a prefill item: its rows or, if it was cut, a part of it; and the merge of parts.
 */
#ifndef CUDA_FLASH_SM80_PREFILL_EPILOGUE_CUH
#define CUDA_FLASH_SM80_PREFILL_EPILOGUE_CUH

#include "sm80_prefill_tiles.cuh"

/* A part of an item: acc_o of its rows, their row_max and their row_sum. */
template <int D> GPU_INLINE float *part_at(const gpu_params &p, int32_t segment)
{
    return p.schedule.parts + (int64_t)segment * SM80_PREFILL_ROWS * (D + 2);
}

/* Writes a warp's part of an item: acc_o, row_max and row_sum of its rows. */
template <int D, int BLOCKS>
GPU_INLINE void write_part(const gpu_run &run, float *part, int first_row,
                           const float (&row_max)[BLOCKS][2], const float (&row_sum)[BLOCKS][2],
                           const float (&acc_o)[BLOCKS][D / 8][4])
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; i++) {
        const int row = first_row + (lane >> 2) + 8 * i;
        if (row >= run.row_tile.num_rows) {
            break;
        }
        if ((lane & 3) == 0) {
            part[SM80_PREFILL_ROWS * D + row] = row_max[i / 2][i % 2];
            part[SM80_PREFILL_ROWS * (D + 1) + row] = row_sum[i / 2][i % 2];
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            *(float2 *)(part + row * D + n * 8 + (lane & 3) * 2) =
                make_float2(acc_o[i / 2][n][i % 2 * 2], acc_o[i / 2][n][i % 2 * 2 + 1]);
        }
    }
}

/* Writes a warp's rows of an item that was not cut; IS_ANY: in either type of 16 bits. They are
 * collected in the warp's own queries, `sq`, and leave in pieces of 16 bytes if the output's rows
 * are aligned. */
template <int KIND, int D, int BLOCKS, bool IS_ANY>
GPU_INLINE void write_rows(const gpu_params &p, const gpu_run &run, char *sq, int first_row,
                           const float (&row_max)[BLOCKS][2], const float (&row_sum)[BLOCKS][2],
                           const float (&acc_o)[BLOCKS][D / 8][4])
{
    constexpr int chunks = D / 8;
    const int lane = threadIdx.x & 31, chunk = lane % chunks, own = own_row<BLOCKS>();
    const int32_t rest = run.row_tile.num_rows - first_row;
    const bool aligned =
        (((uint64_t)(uintptr_t)p.out.data | (uint64_t)p.out.row | (uint64_t)p.out.head) & 15) == 0;
    float own_max = row_max[0][0], own_sum = row_sum[0][0];
#pragma unroll
    for (int i = 1; i < 2 * BLOCKS; i++) {
        const bool is_own = (lane & (2 * BLOCKS - 1)) == i;
        own_max = is_own ? row_max[i / 2][i % 2] : own_max;
        own_sum = is_own ? row_sum[i / 2][i % 2] : own_sum;
    }
    const out_row out = out_row_of(p, run, first_row + (own < rest ? own : 0));
    const bool writes_lse = own < rest && (lane & 3) < 2 * BLOCKS;
    const float own_factor =
        cache_scale(p.v, run.head) *
        softmax_close_base2(out.sink, own_max, own_sum, writes_lse ? out.lse : nullptr);
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; i++) {
        const int row = (lane >> 2) + 8 * i;
        const float factor = __shfl_sync(0xffffffffu, own_factor, (lane & 28) + i);
        char *to = sq + row * D * 2 + (lane & 3) * 4;
#pragma unroll
        for (int n = 0; n < chunks; n++) {
            const float low = acc_o[i / 2][n][i % 2 * 2] * factor,
                        high = acc_o[i / 2][n][i % 2 * 2 + 1] * factor;
            *(uint32_t *)(to + ((n ^ (row & 7)) << 4)) =
                KIND == KIND_BF16 || (IS_ANY && p.out.dtype == ATTN_DTYPE_BF16)
                    ? pack2<KIND_BF16>(low, high)
                    : pack2<KIND_F16>(low, high);
        }
    }
    __syncwarp(); /* the rows are collected */
#pragma unroll 4
    for (int i = 0; i < 16 * BLOCKS * chunks; i += 32) {
        const int row = (i + lane) / chunks;
        char *to = (char *)__shfl_sync(0xffffffffu, (unsigned long long)(uintptr_t)out.data,
                                       lane_of_row(row)) +
                   chunk * 16;
        if (row >= rest || chunk * 8 >= p.problem.head_size_v) {
            continue;
        }
        const uint4 x = *(const uint4 *)(sq + row * D * 2 + ((chunk ^ (row & 7)) << 4));
        if (aligned) {
            *(uint4 *)to = x;
        } else {
            const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int e = 0; e < 8; e++) {
                ((uint16_t *)to)[e] = (uint16_t)(words[e / 2] >> e % 2 * 16);
            }
        }
    }
}

/* Merges the parts of cut items, always in the same order. The segments of such items come first in
 * the schedule, and the CTA of a segment has as many of the item's rows as those of the others. A
 * warp has a row; each lane has the weight of one part and some dims of all. */
template <int KIND, int D>
__global__ void __launch_bounds__(128) prefill_merge(const __grid_constant__ sm80_prefill_params a)
{
    constexpr int own = own_dims<D>;
    const gpu_params &p = a.p;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const bool has_dims = lane * own < D; /* D 64: half of the lanes */
    wait_for_earlier_kernels();
    let_later_kernels_begin();
    for (int32_t i = blockIdx.x; i < p.schedule.header->segments; i += gridDim.x) {
        const gpu_segment &segment = p.schedule.segments[i];
        const int32_t parts = segment.last - segment.first + 1, own_part = i - segment.first;
        if (parts == 1) {
            break;
        }
        gpu_run run = {};
        run.row_tile = segment.row_tile;
        run.head = (segment.begin - run.row_tile.start) / run.row_tile.num_tiles;
        const int32_t rows = run.row_tile.num_rows, end = rows * (own_part + 1) / parts;
        for (int32_t row = rows * own_part / parts + warp; row < end; row += 4) {
            float acc_o[own] = {}, row_max = -INFINITY, row_sum = 0.0f;
            for (int32_t first = 0; first < parts; first += 32) {
                const int32_t here = min(parts - first, 32);
                float part_max = -INFINITY, part_sum = 0.0f;
                if (lane < here) {
                    const float *sums =
                        part_at<D>(p, segment.first + first + lane) + SM80_PREFILL_ROWS * D + row;
                    part_max = sums[0];
                    part_sum = sums[SM80_PREFILL_ROWS];
                }
                const float next = fmaxf(row_max, warp_largest(part_max, false));
                const float base = softmax_base(next), rescale = exp2f(row_max - base);
                const float weight = exp2f(part_max - base);
                row_max = next;
                row_sum = row_sum * rescale + warp_sum(weight * part_sum);
#pragma unroll
                for (int e = 0; e < own; e++) {
                    acc_o[e] *= rescale;
                }
#pragma unroll 8
                for (int32_t j = 0; j < here; j++) {
                    const float scale = __shfl_sync(0xffffffffu, weight, j);
                    const float *from =
                        part_at<D>(p, segment.first + first + j) + row * D + lane * own;
#pragma unroll
                    for (int e = 0; e < own; e += 4) {
                        const float4 x =
                            has_dims ? *(const float4 *)(from + e) : make_float4(0, 0, 0, 0);
                        acc_o[e] += scale * x.x, acc_o[e + 1] += scale * x.y;
                        acc_o[e + 2] += scale * x.z, acc_o[e + 3] += scale * x.w;
                    }
                }
            }
            const out_row out = out_row_of(p, run, row);
            float factor =
                softmax_close_base2(out.sink, row_max, row_sum, lane == 0 ? out.lse : nullptr);
            write_row<KIND, D>(p, a.output, run.head, out, lane, acc_o,
                               factor * cache_scale(p.v, run.head));
        }
    }
}

#endif
