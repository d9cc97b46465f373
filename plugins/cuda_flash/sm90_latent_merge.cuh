/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of items become their output. */
#ifndef CUDA_FLASH_SM90_LATENT_MERGE_CUH
#define CUDA_FLASH_SM90_LATENT_MERGE_CUH

#include "sm90_latent_rows.cuh"

#define MERGE_THREADS 256
#define MERGE_CTAS 3 /* of a multiprocessor */
#define MERGE_STEP 4 /* parts read together */
#define MERGE_PIECES 32

/* The parts of an item that was cut: the first one, and the others by number. */
struct latent_cut {
    int32_t segment, first, second, step, count;
};

/* Segment i, if an item is first cut at its beginning; count 0: none is. */
static __device__ __forceinline__ latent_cut cut_of(const gpu_schedule &plan, int32_t i)
{
    /* of shares' parts, the first begins inside its share; shares abreast are others' */
    const bool shares = plan.by_item == 2;
    const int32_t apart = shares ? plan.abreast : 1;
    const gpu_segment &s = plan.segments[i];
    bool is = shares ? s.begin > s.row_tile.start && s.first == i - apart
                     : s.first == s.index && s.last > s.first;
    latent_cut cut;
    cut.segment = i;
    cut.step = shares ? 2 * apart : 1;
    cut.count = is ? (s.last - s.first) / apart + 1 : 0;
    cut.first = shares ? 2 * s.first + 1 : s.first;
    cut.second = shares ? 2 * (s.first + apart) : s.first + 1;
    return cut;
}

/* A piece of a part as its warp groups had it: thread t has dims 8 piece + 2 (t & 3) of the first
 * half and of the second one, and those behind them, of rows 16 (t / 32) + (t & 31) / 4 and 8
 * behind it. */
template <int KIND>
static __device__ __forceinline__ void merge_piece(const sm90_latent_params &a,
                                                   const latent_cut &cut, int piece)
{
    const gpu_params &p = a.p.attend;
    const int thread = threadIdx.x & 127, row0 = (thread >> 5) * 16 + ((thread & 31) >> 2);
    const gpu_row_tile &item = p.schedule.segments[cut.segment].row_tile;
    if ((row0 & ~15) >= item.num_rows) { /* nor have they been written */
        return;
    }
    float o[2][4] = {}, high[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int32_t n = 0; n < cut.count; n += MERGE_STEP) {
        float4 x[MERGE_STEP][2];
        float m[MERGE_STEP][2], l[MERGE_STEP][2];
#pragma unroll
        for (int i = 0; i < MERGE_STEP; i++) {
            const int64_t at = n + i == 0 ? cut.first : cut.second + (n + i - 1) * cut.step;
            const float *part = p.schedule.parts + at * LATENT_PART;
            const float *bases = part + SM90_LATENT_ROWS * LATENT_MAX_RANK + row0;
            const bool real = n + i < cut.count;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                x[i][h] = real ? ((const float4 *)part)[(h * MERGE_PIECES + piece) * 128 + thread]
                               : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                m[i][h] = real ? bases[8 * h] : -INFINITY;
                l[i][h] = real ? bases[SM90_LATENT_ROWS + 8 * h] : 0.0f;
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) { /* row */
            float to = high[h];
#pragma unroll
            for (int i = 0; i < MERGE_STEP; i++) {
                to = fmaxf(to, m[i][h]);
            }
            const float base = softmax_base(to), f = exp2f(high[h] - base);
            high[h] = to;
            sum[h] *= f;
#pragma unroll
            for (int d = 0; d < 2; d++) {
                o[d][2 * h] *= f, o[d][2 * h + 1] *= f;
            }
#pragma unroll
            for (int i = 0; i < MERGE_STEP; i++) {
                const float g = exp2f(m[i][h] - base);
                sum[h] = fmaf(g, l[i][h], sum[h]);
#pragma unroll
                for (int d = 0; d < 2; d++) {
                    o[d][2 * h] = fmaf(g, h ? x[i][d].z : x[i][d].x, o[d][2 * h]);
                    o[d][2 * h + 1] = fmaf(g, h ? x[i][d].w : x[i][d].y, o[d][2 * h + 1]);
                }
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int32_t row = row0 + 8 * h;
        if (row >= item.num_rows) {
            continue;
        }
        int32_t at = item.first_row + row, index = at / p.problem.group;
        int64_t token = item.query_start + index, head = at - index * p.problem.group;
        float sink = p.problem.sinks != nullptr ? p.problem.sinks[head] * LOG2E : -INFINITY;
        float *lse = piece == 0 && (thread & 3) == 0 && p.lse.data != nullptr
                         ? &p.lse.data[head * p.lse.head + token * p.lse.row]
                         : nullptr;
        float factor = softmax_close_base2(sink, high[h], sum[h], lse) * value_scale(p.k);
        char *to = p.out.data + token * p.out.row + head * p.out.head;
#pragma unroll
        for (int d = 0; d < 2; d++) {
            const int dim = d * 256 + piece * 8 + (thread & 3) * 2;
            number_store(to, p.out.dtype, dim, o[d][2 * h] * factor);
            number_store(to, p.out.dtype, dim + 1, o[d][2 * h + 1] * factor);
        }
    }
}

/* All pieces of all items that were cut, by 128 threads each: merge(cut, piece). */
template <int PIECES, class MERGE>
static __device__ __forceinline__ void merge_cuts(const sm90_latent_params &a, MERGE merge)
{
    __shared__ latent_cut cuts[MERGE_THREADS];
    __shared__ int32_t found[MERGE_THREADS / 32];
    const gpu_schedule &plan = a.p.attend.schedule;
    /* the schedule was there before the attend let this kernel begin */
    const int32_t segments = plan.header->segments;
    for (int32_t from = 0; from == 0 || from < segments; from += MERGE_THREADS) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        latent_cut cut = {};
        if (from + (int32_t)threadIdx.x < segments) {
            cut = cut_of(plan, from + (int32_t)threadIdx.x);
        }
        const uint32_t are = __ballot_sync(0xffffffffu, cut.count > 0);
        found[warp] = __popc(are);
        __syncthreads(); /* all warps have counted theirs */
        int32_t at = __popc(are & ((1u << lane) - 1)), count = 0;
        for (int i = 0; i < MERGE_THREADS / 32; i++) {
            at += i < warp ? found[i] : 0;
            count += found[i];
        }
        if (cut.count > 0) {
            cuts[at] = cut;
        }
        __syncthreads(); /* the cuts are there */
        if (from == 0) {
            wait_for_earlier_kernels();
            let_later_kernels_begin();
        }
        for (int32_t n = (int32_t)blockIdx.x * 2 + (threadIdx.x >> 7); n < count * PIECES;
             n += (int32_t)gridDim.x * 2) {
            merge(cuts[n / PIECES], n % PIECES);
        }
        __syncthreads(); /* they have been read */
    }
}

/* The parts of items that were cut become their output. */
template <int KIND>
__global__ void __launch_bounds__(MERGE_THREADS, MERGE_CTAS)
    merge_latent(const __grid_constant__ sm90_latent_params a)
{
    merge_cuts<MERGE_PIECES>(
        a, [&](const latent_cut &cut, int piece) { merge_piece<KIND>(a, cut, piece); });
}

#endif
