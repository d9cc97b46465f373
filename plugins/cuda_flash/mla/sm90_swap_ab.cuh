/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla on sm_90a for items of up to 32 rows: the heads of a query, of several queries, or a
 * part of a query's heads. Keys are the left side of both products, so that few rows do not pay for
 * 64: one warp group makes scores^T = keys x queries and their weights, the other out^T += values^T
 * x weights, whose rows are dims. A tile of 64 keys is nine columns of 64 dims in a ring of slots
 * of 8 KiB, which has all the shared memory that queries leave. A tile: 72 KiB, which take 2100 ns
 * of a CTA's part of the memory's rate; its products take 1300 clocks of the tensor cores. */
#ifndef CUDA_FLASH_SM90_SWAP_AB_CUH
#define CUDA_FLASH_SM90_SWAP_AB_CUH

#include "sm90_latent_merge.cuh"
#include "sm90_swap_ab_softmax.cuh"

#define FEW_THREADS 384 /* scores, values, copies: a warp group each */
#define FEW_SCORE_REGISTERS 184
#define FEW_VALUE_REGISTERS 216
#define FEW_COPY_REGISTERS 104
#define FEW_BLOCKS 8 /* of 64 dims of a value */

/* Numbers of a part: sums of all rows, their bases, and what their weights add up to. */
template <int ROWS> constexpr int few_part = ROWS *(LATENT_MAX_RANK + 2);

/* 16 bytes of a row of out by four lanes, each of which has 4 of four such pieces: `piece` says
 * where they are. */
template <class PLACE>
static __device__ __forceinline__ void write_pieces(char *row, bool real, int32_t wide,
                                                    uint32_t (&x)[4], PLACE piece)
{
    const int part = threadIdx.x & 3;
    if (wide == 8) {
        turn_square(x);
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

/* The row of out of an item's row, and its head. */
struct few_row {
    int64_t token, head;
};

static __device__ __forceinline__ few_row row_of_item(const gpu_problem &p,
                                                      const gpu_row_tile &item, int32_t row)
{
    const int32_t at = item.first_row + row, index = at / p.group;
    return {item.query_start + index, at - index * p.group};
}

/* Closes a row; `tells`: by this thread its log-sum-exp is written. */
static __device__ __forceinline__ float close_few(const gpu_params &p, const gpu_row_tile &item,
                                                  int32_t row, float m, float l, bool tells)
{
    if (row >= item.num_rows) {
        return 0.0f;
    }
    const few_row out = row_of_item(p.problem, item, row);
    const float sink = p.problem.sinks != nullptr ? p.problem.sinks[out.head] * LOG2E : -INFINITY;
    float *lse = tells && p.lse.data != nullptr
                     ? &p.lse.data[out.head * p.lse.head + out.token * p.lse.row]
                     : nullptr;
    return softmax_close_base2(sink, m, l, lse);
}

/* A run's sums go out: the item's output, or a part of it, as threads have them. Of block c and
 * rows 8 i .. 8 i + 7 a thread has dims 64 c + 16 warp + lane / 4 and 8 behind it, of rows 8 i + 2
 * (lane & 3) and the next. */
template <int KIND, int ROWS>
static __device__ __forceinline__ void
finish_few(const sm90_latent_params &a, const latent_run &run, const float (&m)[ROWS / 4],
           const float (&l)[ROWS / 4], const float (&o)[FEW_BLOCKS][ROWS / 2])
{
    const gpu_params &p = a.p.attend;
    const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
    if (run.part >= 0) {
        float *part = p.schedule.parts + (int64_t)run.part * few_part<ROWS>;
        float4 *to = (float4 *)part + thread;
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++) {
#pragma unroll
            for (int c = 0; c < FEW_BLOCKS && 8 * i < run.item.num_rows; c++) {
                const float *x = &o[c][4 * i];
                to[(c * (ROWS / 8) + i) * 128] = make_float4(x[0], x[1], x[2], x[3]);
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS / 4 && thread < 4; i++) {
            const int row = (i >> 1) * 8 + thread * 2 + (i & 1);
            part[ROWS * LATENT_MAX_RANK + row] = m[i];
            part[ROWS * (LATENT_MAX_RANK + 1) + row] = l[i];
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) {
        if (8 * i >= run.item.num_rows) { /* none of them is real */
            continue;
        }
        float f[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            f[e] = close_few(p, run.item, 8 * i + (lane & 3) * 2 + e, m[2 * i + e], l[2 * i + e],
                             thread < 4);
        }
        const int32_t row = 8 * i + (lane >> 2);
        const few_row out = row_of_item(p.problem, run.item, row);
        char *to = p.out.data + out.token * p.out.row + out.head * p.out.head + warp * 32;
#pragma unroll
        for (int c = 0; c < FEW_BLOCKS; c += 2) {
            uint32_t x[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float *y = &o[c + (n >> 1)][4 * i + (n & 1) * 2];
                x[n] = transpose(pack2<KIND>(y[0] * f[0], y[1] * f[1]));
            }
            write_pieces(to + c * 128, row < run.item.num_rows, a.wide_out, x,
                         [](int n) { return (n >> 1) * 128 + (n & 1) * 16; });
        }
    }
}

/* Out^T of all runs: values^T x weights. */
template <int KIND, int ROWS>
static __device__ __forceinline__ void add_values(const sm90_latent_params &a,
                                                  few_shared<ROWS> &mine)
{
    const gpu_params &p = a.p.attend;
    const int lane = threadIdx.x & 31;
    const uint64_t ring = matrix_at(shared_address(mine.k), LATENT_COLUMN_BYTES, 1024);
    const uint64_t weights = matrix_at(shared_address(mine.weights), 0, 1024);
    few_place<few_shared<ROWS>::SLOTS> place = {0, 0};
    float o[FEW_BLOCKS][ROWS / 2], m[ROWS / 4], l[ROWS / 4];
    int turn = 0;
#pragma unroll 1
    for (few_runs runs(p.schedule); runs.real; runs.advance(p.schedule)) {
        const latent_run &run = runs.run;
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++) {
            m[i] = -INFINITY;
        }
#pragma unroll 1
        for (int32_t t = 0; t < run.count; t++, turn++) {
            const int b = turn & 1;
            barrier_wait(shared_address(&mine.weights_full[b]), turn >> 1 & 1);
            if (mine.moved[b] != 0) {
#pragma unroll
                for (int i = 0; i < ROWS / 4; i++) {
                    const float to = mine.base[b][(i >> 1) * 8 + (lane & 3) * 2 + (i & 1)];
                    const float f = fast_exp2(m[i] - softmax_base(to));
                    m[i] = to;
#pragma unroll
                    for (int c = 0; c < FEW_BLOCKS; c++) { /* a run's first ones are not used */
                        o[c][(i >> 1) * 4 + (i & 1)] *= f;
                        o[c][(i >> 1) * 4 + (i & 1) + 2] *= f;
                    }
                }
            }
#pragma unroll
            for (int c = 0; c < FEW_BLOCKS; c++) {
                const uint64_t v = ring + place.slot_of(1 + c) * (LATENT_COLUMN_BYTES / 16);
                pin(o[c]);
                wgmma_begin();
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    wgmma_few<KIND, ROWS, true>(o[c], v + i * 128, weights + b * (ROWS * 8) + i * 2,
                                                t > 0 || i > 0);
                }
                wgmma_commit();
                if (c > 0) {
                    wgmma_wait<1>();
                    arrive_warp(mine.empty[place.slot_of(c)]);
                }
            }
            wgmma_wait<0>();
#pragma unroll
            for (int c = 0; c < FEW_BLOCKS; c++) {
                pin(o[c]);
            }
            arrive_warp(mine.empty[place.slot_of(FEW_BLOCKS)]);
            if (t + 1 == run.count) { /* sums come with the last weights */
#pragma unroll
                for (int i = 0; i < ROWS / 4; i++) {
                    const int row = (i >> 1) * 8 + (lane & 3) * 2 + (i & 1);
                    l[i] = (mine.sum[b][0][row] + mine.sum[b][1][row]) +
                           (mine.sum[b][2][row] + mine.sum[b][3][row]);
                }
            }
            arrive_warp(mine.weights_empty[b]);
            place.advance();
        }
        finish_few<KIND, ROWS>(a, run, m, l, o);
    }
}

template <int ROWS> static __device__ __forceinline__ void init_few_barriers(few_shared<ROWS> &mine)
{
    barrier_init(shared_address(&mine.q_full), 1);
    barrier_init(shared_address(&mine.q_empty), 4);
    for (int i = 0; i < few_shared<ROWS>::SLOTS; i++) {
        barrier_init(shared_address(&mine.full[i]), 1);
        barrier_init(shared_address(&mine.empty[i]), 4);
    }
    for (int b = 0; b < 2; b++) {
        barrier_init(shared_address(&mine.weights_full[b]), 128);
        barrier_init(shared_address(&mine.weights_empty[b]), 4);
    }
    fence_barriers();
}

template <int KIND, int ROWS>
__global__ void __launch_bounds__(FEW_THREADS, 1)
    attend_latent_few(const __grid_constant__ sm90_latent_params a)
{
    extern __shared__ __align__(1024) char memory[];
    few_shared<ROWS> &mine = *(few_shared<ROWS> *)memory;
    if (threadIdx.x == 0) {
        init_few_barriers(mine);
        if (a.mapped) {
            fetch_map(&a.k_map);
        }
    }
    __syncthreads(); /* the barriers are there */
    wait_for_earlier_kernels();
    let_later_kernels_begin();
    const int group = threadIdx.x >> 7;
    if (group == 0) { /* registers of a thread: 168 when it begins */
        give_registers<FEW_COPY_REGISTERS>();
        if (threadIdx.x < 32) {
            copy_few_keys(a, mine);
        } else if (threadIdx.x < 64) {
            copy_few_queries(a, mine);
        }
    } else if (group == 1) {
        take_registers<FEW_SCORE_REGISTERS>();
        make_weights<KIND, ROWS>(a, mine);
    } else {
        take_registers<FEW_VALUE_REGISTERS>();
        add_values<KIND, ROWS>(a, mine);
    }
}

/* Pieces of an item's parts, see finish_few: 4 (c * (ROWS / 8) + i) + warp. */
template <int KIND, int PART_ROWS> struct few_pieces {
    static constexpr int ROWS = PART_ROWS, COUNT = ROWS * LATENT_MAX_RANK / 256, APART = 1;
    static constexpr bool BY_ROWS = false;

    static __device__ __forceinline__ int first_row(int piece)
    {
        return (piece >> 2) % (ROWS / 8) * 8;
    }

    static __device__ __forceinline__ int row(int piece)
    {
        return first_row(piece) + (threadIdx.x & 3) * 2;
    }

    static __device__ __forceinline__ void
    store(const sm90_latent_params &a, const gpu_row_tile &item, int piece, const merged_piece &x)
    {
        const gpu_params &p = a.p.attend;
        const int lane = threadIdx.x & 31, c = (piece >> 2) / (ROWS / 8), warp = piece & 3;
        const bool tells = c == 0 && warp == 0 && lane < 4;
        const float first = close_few(p, item, row(piece), x.high.x, x.sum.x, tells);
        const float second = close_few(p, item, row(piece) + 1, x.high.y, x.sum.y, tells);
        const int32_t at_row = first_row(piece) + (lane >> 2);
        const few_row out = row_of_item(p.problem, item, at_row);
        char *to = p.out.data + out.token * p.out.row + out.head * p.out.head + c * 128 + warp * 32;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 &o = x.o[i >> 1];
            const uint32_t y =
                transpose(pack2<KIND>((i & 1 ? o.z : o.x) * first, (i & 1 ? o.w : o.y) * second));
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
    merge_latent_few(const __grid_constant__ sm90_latent_params a)
{
    merge_cuts<few_pieces<KIND, ROWS>>(a);
}

#endif
