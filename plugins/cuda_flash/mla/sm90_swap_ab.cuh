/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla on sm_90a for items of up to 32 rows: heads of one query, of several queries, or a
 * part of a query's heads. Operands are swapped, so that few rows do not pay for 64: one warp group
 * makes S^T = K Q^T and P^T, the other O^T += V^T P^T. A tile of 64 keys is nine columns of 64 dims
 * in a ring of 8 KiB slots, which has all the shared memory that the queries leave. A tile has 72
 * KiB, which take 2100 ns of a CTA's share of the memory bandwidth; its products take 1300 clocks
 * of the tensor cores. */
#ifndef CUDA_FLASH_SM90_SWAP_AB_CUH
#define CUDA_FLASH_SM90_SWAP_AB_CUH

#include "sm90_latent_merge.cuh"
#include "sm90_swap_ab_softmax.cuh"

#define SWAP_AB_THREADS 384 /* warp groups: producers, softmax, P V */
#define SWAP_AB_SOFTMAX_REGISTERS 184
#define SWAP_AB_PV_REGISTERS 216
#define SWAP_AB_PRODUCER_REGISTERS 104
#define SWAP_AB_BLOCKS 8 /* blocks of 64 dims of a value */

/* Floats of a part: acc_o of all rows, row_max and row_sum. */
template <int ROWS> constexpr int swap_ab_part = ROWS *(LATENT_MAX_RANK + 2);

/* Four lanes write 16 bytes of a row of out each; each lane holds 4 bytes of four such pieces.
 * `piece` gives a piece's offset. */
template <class PLACE>
GPU_INLINE void write_pieces(char *row, bool real, int32_t wide, uint32_t (&x)[4], PLACE piece)
{
    const int part = threadIdx.x & 3;
    if (wide == 8) {
        transpose_4x4(x);
        if (real) {
            *(uint4 *)(row + piece(part)) = make_uint4(x[0], x[1], x[2], x[3]);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint16_t *at = (uint16_t *)(row + piece(i) + part * 4);
        if (real && wide == 2) {
            *(uint32_t *)at = x[i];
        } else if (real) {
            at[0] = (uint16_t)x[i];
            at[1] = (uint16_t)(x[i] >> 16);
        }
    }
}

/* The token and head of an item's row. */
struct out_row {
    int64_t token, head;
};

GPU_INLINE out_row row_of_item(const gpu_problem &p, const gpu_row_tile &item, int32_t row)
{
    const int32_t at = item.first_row + row, index = at / p.group;
    return {item.query_start + index, at - index * p.group};
}

/* The final factor of a row. With writes_lse, this thread writes its log-sum-exp. */
GPU_INLINE float close_row(const gpu_params &p, const gpu_row_tile &item, int32_t row,
                           float row_max, float row_sum, bool writes_lse)
{
    if (row >= item.num_rows) {
        return 0.0f;
    }
    const out_row out = row_of_item(p.problem, item, row);
    const float sink = p.problem.sinks != nullptr ? p.problem.sinks[out.head] * LOG2E : -INFINITY;
    float *lse = writes_lse && p.lse.data != nullptr
                     ? &p.lse.data[out.head * p.lse.head + out.token * p.lse.row]
                     : nullptr;
    return softmax_close_base2(sink, row_max, row_sum, lse);
}

/* Writes acc_o of a run to the output or to a part of the item, there in the layout of the threads.
 * Of block c and rows 8 i .. 8 i + 7, a thread has dims 64 c + 16 warp + lane / 4 and that + 8 of
 * rows 8 i + 2 (lane & 3) and the next. */
template <int KIND, int ROWS>
GPU_INLINE void epilogue_swap_ab(const sm90_latent_params &a, const latent_run &run,
                                 const float (&row_max)[ROWS / 4], const float (&row_sum)[ROWS / 4],
                                 const float (&acc_o)[SWAP_AB_BLOCKS][ROWS / 2])
{
    const gpu_params &p = a.p.attend;
    const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
    if (run.part >= 0) {
        float *part = p.schedule.parts + (int64_t)run.part * swap_ab_part<ROWS>;
        float4 *to = (float4 *)part + thread;
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++) {
#pragma unroll
            for (int c = 0; c < SWAP_AB_BLOCKS && 8 * i < run.item.num_rows; c++) {
                const float *x = &acc_o[c][4 * i];
                to[(c * (ROWS / 8) + i) * 128] = make_float4(x[0], x[1], x[2], x[3]);
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS / 4 && thread < 4; i++) {
            const int row = (i >> 1) * 8 + thread * 2 + (i & 1);
            part[ROWS * LATENT_MAX_RANK + row] = row_max[i];
            part[ROWS * (LATENT_MAX_RANK + 1) + row] = row_sum[i];
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) {
        if (8 * i >= run.item.num_rows) { /* all of these rows are out of range */
            continue;
        }
        float f[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            f[e] = close_row(p, run.item, 8 * i + (lane & 3) * 2 + e, row_max[2 * i + e],
                             row_sum[2 * i + e], thread < 4);
        }
        const int32_t row = 8 * i + (lane >> 2);
        const out_row out = row_of_item(p.problem, run.item, row);
        char *to = p.out.data + out.token * p.out.row + out.head * p.out.head + warp * 32;
#pragma unroll
        for (int c = 0; c < SWAP_AB_BLOCKS; c += 2) {
            uint32_t x[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float *y = &acc_o[c + (n >> 1)][4 * i + (n & 1) * 2];
                x[n] = transpose(pack2<KIND>(y[0] * f[0], y[1] * f[1]));
            }
            write_pieces(to + c * 128, row < run.item.num_rows, a.wide_out, x,
                         [](int n) { return (n >> 1) * 128 + (n & 1) * 16; });
        }
    }
}

/* The consumer warp group that computes O^T += V^T P^T of all runs. */
template <int KIND, int ROWS>
GPU_INLINE void pv_consumer(const sm90_latent_params &a, swap_ab_shared<ROWS> &smem)
{
    const gpu_params &p = a.p.attend;
    const int lane = threadIdx.x & 31;
    const uint64_t ring = descriptor_at(shared_address(smem.k), LATENT_COLUMN_BYTES, 1024);
    const uint64_t probs = descriptor_at(shared_address(smem.p), 0, 1024);
    ring_state<swap_ab_shared<ROWS>::SLOTS> place = {0, 0};
    float acc_o[SWAP_AB_BLOCKS][ROWS / 2], row_max[ROWS / 4], row_sum[ROWS / 4];
    int turn = 0;
#pragma unroll 1
    for (run_iterator runs(p.schedule); runs.real; runs.advance(p.schedule)) {
        const latent_run &run = runs.run;
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++) {
            row_max[i] = -INFINITY;
        }
#pragma unroll 1
        for (int32_t t = 0; t < run.count; t++, turn++) {
            const int b = turn & 1;
            barrier_wait(shared_address(&smem.p_full[b]), turn >> 1 & 1);
            if (smem.row_max_moved[b] != 0) {
#pragma unroll
                for (int i = 0; i < ROWS / 4; i++) {
                    const float new_max = smem.row_max[b][(i >> 1) * 8 + (lane & 3) * 2 + (i & 1)];
                    const float scores_scale = fast_exp2(row_max[i] - softmax_base(new_max));
                    row_max[i] = new_max;
#pragma unroll
                    /* the first P V of a run overwrites acc_o */
                    for (int c = 0; c < SWAP_AB_BLOCKS; c++) {
                        acc_o[c][(i >> 1) * 4 + (i & 1)] *= scores_scale;
                        acc_o[c][(i >> 1) * 4 + (i & 1) + 2] *= scores_scale;
                    }
                }
            }
#pragma unroll
            for (int c = 0; c < SWAP_AB_BLOCKS; c++) {
                const uint64_t v = ring + place.slot_of(1 + c) * (LATENT_COLUMN_BYTES / 16);
                pin(acc_o[c]);
                wgmma_begin();
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    wgmma_ss_small_n<KIND, ROWS, true>(
                        acc_o[c], v + i * 128, probs + b * (ROWS * 8) + i * 2, t > 0 || i > 0);
                }
                wgmma_commit();
                if (c > 0) {
                    wgmma_wait<1>();
                    arrive_warp(smem.empty[place.slot_of(c)]);
                }
            }
            wgmma_wait<0>();
#pragma unroll
            for (int c = 0; c < SWAP_AB_BLOCKS; c++) {
                pin(acc_o[c]);
            }
            arrive_warp(smem.empty[place.slot_of(SWAP_AB_BLOCKS)]);
            if (t + 1 == run.count) { /* row_sum comes with the last P */
#pragma unroll
                for (int i = 0; i < ROWS / 4; i++) {
                    const int row = (i >> 1) * 8 + (lane & 3) * 2 + (i & 1);
                    row_sum[i] = (smem.row_sum[b][0][row] + smem.row_sum[b][1][row]) +
                                 (smem.row_sum[b][2][row] + smem.row_sum[b][3][row]);
                }
            }
            arrive_warp(smem.p_empty[b]);
            place.advance();
        }
        epilogue_swap_ab<KIND, ROWS>(a, run, row_max, row_sum, acc_o);
    }
}

template <int ROWS> GPU_INLINE void init_barriers_swap_ab(swap_ab_shared<ROWS> &smem)
{
    barrier_init(shared_address(&smem.q_full), 1);
    barrier_init(shared_address(&smem.q_empty), 4);
    for (int i = 0; i < swap_ab_shared<ROWS>::SLOTS; i++) {
        barrier_init(shared_address(&smem.full[i]), 1);
        barrier_init(shared_address(&smem.empty[i]), 4);
    }
    for (int b = 0; b < 2; b++) {
        barrier_init(shared_address(&smem.p_full[b]), 128);
        barrier_init(shared_address(&smem.p_empty[b]), 4);
    }
    fence_barriers();
}

template <int KIND, int ROWS>
__global__ void __launch_bounds__(SWAP_AB_THREADS, 1)
    attend_latent_swap_ab(const __grid_constant__ sm90_latent_params a)
{
    extern __shared__ __align__(1024) char memory[];
    swap_ab_shared<ROWS> &smem = *(swap_ab_shared<ROWS> *)memory;
    if (threadIdx.x == 0) {
        init_barriers_swap_ab(smem);
        if (a.mapped) {
            fetch_map(&a.k_map);
        }
    }
    __syncthreads(); /* the barriers are initialized */
    wait_for_earlier_kernels();
    let_later_kernels_begin();
    const int group = threadIdx.x >> 7;
    if (group == 0) { /* a thread starts with 168 registers */
        dealloc_registers<SWAP_AB_PRODUCER_REGISTERS>();
        if (threadIdx.x < 32) {
            key_producer(a, smem);
        } else if (threadIdx.x < 64) {
            query_producer(a, smem);
        }
    } else if (group == 1) {
        alloc_registers<SWAP_AB_SOFTMAX_REGISTERS>();
        softmax_consumer<KIND, ROWS>(a, smem);
    } else {
        alloc_registers<SWAP_AB_PV_REGISTERS>();
        pv_consumer<KIND, ROWS>(a, smem);
    }
}

/* The layout of an item's parts, as epilogue_swap_ab writes them: piece 4 (c * (ROWS / 8) + i) +
 * warp. */
template <int KIND, int PART_ROWS> struct swap_ab_pieces {
    static constexpr int ROWS = PART_ROWS, COUNT = ROWS * LATENT_MAX_RANK / 256, APART = 1;
    static constexpr bool BY_ROWS = false;

    GPU_INLINE int first_row(int piece)
    {
        return (piece >> 2) % (ROWS / 8) * 8;
    }

    GPU_INLINE int row(int piece)
    {
        return first_row(piece) + (threadIdx.x & 3) * 2;
    }

    GPU_INLINE void store(const sm90_latent_params &a, const gpu_row_tile &item, int piece,
                          const merged_piece &x)
    {
        const gpu_params &p = a.p.attend;
        const int lane = threadIdx.x & 31, c = (piece >> 2) / (ROWS / 8), warp = piece & 3;
        const bool writes_lse = c == 0 && warp == 0 && lane < 4;
        const float first = close_row(p, item, row(piece), x.row_max.x, x.row_sum.x, writes_lse);
        const float second =
            close_row(p, item, row(piece) + 1, x.row_max.y, x.row_sum.y, writes_lse);
        const int32_t at_row = first_row(piece) + (lane >> 2);
        const out_row out = row_of_item(p.problem, item, at_row);
        char *to = p.out.data + out.token * p.out.row + out.head * p.out.head + c * 128 + warp * 32;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 &acc_o = x.acc_o[i >> 1];
            const uint32_t y = transpose(pack2<KIND>((i & 1 ? acc_o.z : acc_o.x) * first,
                                                     (i & 1 ? acc_o.w : acc_o.y) * second));
            uint16_t *at = (uint16_t *)(to + (i >> 1) * 512 + (i & 1) * 16 + (lane & 3) * 4);
            if (at_row < item.num_rows && a.wide_out >= 2) {
                *(uint32_t *)at = y;
            } else if (at_row < item.num_rows) {
                at[0] = (uint16_t)y;
                at[1] = (uint16_t)(y >> 16);
            }
        }
    }
};

template <int KIND, int ROWS>
__global__ void __launch_bounds__(MERGE_THREADS, 1)
    merge_latent_swap_ab(const __grid_constant__ sm90_latent_params a)
{
    merge_cuts<swap_ab_pieces<KIND, ROWS>>(a);
}

#endif
