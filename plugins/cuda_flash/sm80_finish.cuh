/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a run: the warps' shares are joined, and written out or, if other CTAs have parts of
 * the item, left as a part; who finishes last merges the parts in their order. */
#ifndef CUDA_FLASH_SM80_FINISH_CUH
#define CUDA_FLASH_SM80_FINISH_CUH

#include "sm80_produce.cuh"

/* Dim of element e (0 or 1) of column tile n in a lane. */
template <int KIND> static __device__ __forceinline__ int value_dim(int n, int lane, int e)
{
    if constexpr (KIND >= KIND_E4M3) {
        return (n >> 1) * 16 + (lane & 3) * 4 + 2 * e + (n & 1);
    }
    return n * 8 + (lane & 3) * 2 + e;
}

struct out_row {
    char *data;
    float *lse;
    float sink; /* base 2; -inf: none */
};

static __device__ __forceinline__ out_row out_row_of(const gpu_params &p, const gpu_run &run,
                                                     int row)
{
    int32_t at = run.row_tile.first_row + row, index = at / p.problem.group;
    int64_t token = run.row_tile.query_start + index;
    int32_t head = run.head * p.problem.group + at - index * p.problem.group;
    out_row v;
    v.data = p.out.data + token * p.out.row + head * p.out.head;
    v.lse = p.lse.data != nullptr ? p.lse.data + head * p.lse.head + token * p.lse.row : nullptr;
    v.sink = p.problem.sinks != nullptr ? p.problem.sinks[head] * LOG2E : -INFINITY;
    return v;
}

/* What all values of a head are multiplied by; per channel in write_values. */
static __device__ __forceinline__ float value_scale(const gpu_params &p, int32_t head)
{
    return p.v.form == GPU_ROW_NUMBERS ? cache_scale(p.v, head) : 1.0f;
}

/* In a call: what writes rows is read from far away when it is needed, so it stays small. */
static __device__ __noinline__ void store_number(char *row, int32_t dtype, int32_t d, float x)
{
    number_store(row, dtype, d, x);
}

/* N neighbouring dims from `d` on. */
template <int N>
static __device__ __forceinline__ void write_values(const gpu_params &p, int32_t head, char *row,
                                                    int d, const float (&x)[N], float factor)
{
    bool is_short = p.out.dtype == ATTN_DTYPE_BF16 || p.out.dtype == ATTN_DTYPE_F16;
    if (N % 2 == 0 && is_short && p.v.form != GPU_ROW_CHANNEL && d + N <= p.problem.head_size_v &&
        ((uintptr_t)row & 3) == 0) {
        uint32_t *to = (uint32_t *)(row + d * 2);
#pragma unroll
        for (int e = 0; e + 1 < N; e += 2) {
            float a = x[e] * factor, b = x[e + 1] * factor;
            to[e / 2] =
                p.out.dtype == ATTN_DTYPE_BF16 ? pack2<KIND_BF16>(a, b) : pack2<KIND_F16>(a, b);
        }
        return;
    }
#pragma unroll
    for (int e = 0; e < N; e++) {
        if (d + e < p.problem.head_size_v) {
            float v = x[e] * factor;
            if (p.v.form == GPU_ROW_CHANNEL) {
                v *= p.v.channel[(int64_t)head * p.problem.head_size_v + d + e];
            }
            store_number(row, p.out.dtype, d + e, v);
        }
    }
}

/* Parts first .. last of an item, always in this order: the same bits every time. A warp has a row:
 * each lane the weight of one part of a pass, and `own` dims of all. What a pass reads is on its
 * way before the weights are known; loops stay rolled, since this code is not in the instruction
 * cache. */
template <int D, int SCRATCH>
static __device__ __forceinline__ void merge_parts(const gpu_params &p, const gpu_run &run,
                                                   int32_t first_slot, int32_t slot_step,
                                                   char *scratch)
{
    constexpr int own = D > 128 ? D / 32 : 4, room = SCRATCH / (128 * own * 4),
                  pass = room < 32 ? room : 32;
    const int64_t size = (int64_t)p.schedule.tile_rows * (D + 2), step = slot_step * size;
    const float *zeroth = p.schedule.parts + first_slot * size,
                *rest = p.schedule.parts + run.first * step;
    int32_t count = run.last - run.first + 1, lane = threadIdx.x & 31;
    auto part_at = [&](int32_t i) { return i == 0 ? zeroth : rest + i * step; };
    auto copy_at = [&](int32_t i) { return scratch + (i * 128 + threadIdx.x) * own * 4; };
    bool has_dims = lane * own < D; /* D 64: half of the lanes */
    float v_scale = value_scale(p, run.head);
#pragma unroll 1
    for (int32_t row = threadIdx.x >> 5; row < run.row_tile.num_rows; row += 4) {
        float o[own], high = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int e = 0; e < own; e++) {
            o[e] = 0.0f;
        }
#pragma unroll 1
        for (int32_t base = 0; base < count; base += pass) {
            int32_t here = min(count - base, pass);
            float m = -INFINITY, l = 0.0f;
            if (lane < here) {
                const float *at = part_at(base + lane) + p.schedule.tile_rows * D + row;
                m = __ldcg(at);
                l = __ldcg(at + p.schedule.tile_rows);
            }
#pragma unroll 2
            for (int32_t i = 0; i < here; i++) {
                const float *from = part_at(base + i) + row * D + lane * own;
#pragma unroll
                for (int e = 0; e < own && has_dims; e += 4) {
                    copy16(shared_address(copy_at(i) + e * 4), from + e, 16);
                }
            }
            float before = high;
            high = fmaxf(high, warp_largest(m, false));
            float at = softmax_base(high), shrink = exp2f(before - at);
            float weight = exp2f(m - at);
            sum = sum * shrink + warp_sum(weight * l);
#pragma unroll
            for (int e = 0; e < own; e++) {
                o[e] *= shrink;
            }
            wait_for_copies(); /* a thread reads what it has copied itself */
#pragma unroll 4
            for (int32_t i = 0; i < here; i++) {
                float f = __shfl_sync(0xffffffffu, weight, i);
                const float *x = (const float *)copy_at(i);
#pragma unroll
                for (int e = 0; e < own; e++) {
                    o[e] += f * x[e];
                }
            }
        }
        out_row out = out_row_of(p, run, row);
        float factor = softmax_close_base2(out.sink, high, sum, lane == 0 ? out.lse : nullptr);
        if (has_dims) {
            write_values<own>(p, run.head, out.data, lane * own, o, factor * v_scale);
        }
    }
}

/* The 4 warps' shares of 16 rows through the stage that they have all read; ROUND rows at a time.
 * A row's dims are rotated by 8 per row, so that neighbouring rows stand in other banks. */
template <int KIND, int D, int ROUND>
static __device__ __forceinline__ void
join_warps(const gpu_params &p, const gpu_run &run, float *scratch, float *sm, bool whole,
           float *part, const float (&m)[2], const float (&l)[2], const float (&o)[D / 8][4])
{
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
    float *sl = sm + 64;
    float v_scale = value_scale(p, run.head);
    barrier_consumers(); /* all warps have read the stage */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if ((lane & 3) == 0) {
            sm[warp * 16 + g + 8 * i] = m[i];
            sl[warp * 16 + g + 8 * i] = l[i];
        }
    }
#pragma unroll
    for (int first = 0; first < 16; first += ROUND) {
        if (first >= run.row_tile.num_rows) {
            break;
        }
#pragma unroll
        for (int i = first / 8; i < (first + ROUND) / 8; i++) {
            if (8 * i < run.row_tile.num_rows) {
                float *to = scratch + (warp * ROUND + g + 8 * i - first) * D;
#pragma unroll
                for (int n = 0; n < D / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        to[value_dim<KIND>(n, lane, e) ^ (g * 8)] = o[n][2 * i + e];
                    }
                }
            }
        }
        barrier_consumers(); /* the shares are there */
        int rows = min(ROUND, run.row_tile.num_rows - first);
#pragma unroll 1
        for (int i = threadIdx.x; i < rows * (D / 4); i += 128) {
            int r = i / (D / 4), d = i % (D / 4) * 4, row = first + r;
            float high = fmaxf(fmaxf(sm[row], sm[16 + row]), fmaxf(sm[32 + row], sm[48 + row]));
            float base = softmax_base(high), sum = 0.0f;
            float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float f = exp2f(sm[w * 16 + row] - base);
                float4 y = *(const float4 *)(scratch + (w * ROUND + r) * D + (d ^ ((r & 7) * 8)));
                sum += f * sl[w * 16 + row];
                x[0] += f * y.x, x[1] += f * y.y, x[2] += f * y.z, x[3] += f * y.w;
            }
            if (!whole) {
                *(float4 *)(part + row * D + d) = make_float4(x[0], x[1], x[2], x[3]);
                if (d == 0) {
                    part[16 * D + row] = high;
                    part[16 * (D + 1) + row] = sum;
                }
            } else {
                out_row out = out_row_of(p, run, row);
                float factor = softmax_close_base2(out.sink, high, sum, d == 0 ? out.lse : nullptr);
                write_values<4>(p, run.head, out.data, d, x, factor * v_scale);
            }
        }
        if (first + ROUND < 16) {
            barrier_consumers(); /* the scratch is used again */
        }
    }
}

/* 64 rows: a warp has all keys of its 16. */
template <int KIND, int D>
static __device__ __forceinline__ void store_rows(const gpu_params &p, const gpu_run &run,
                                                  bool whole, float *part, const float (&m)[2],
                                                  const float (&l)[2], const float (&o)[D / 8][4])
{
    constexpr int near = KIND >= KIND_E4M3 ? 2 : 1; /* column tiles whose dims alternate */
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float v_scale = value_scale(p, run.head);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = warp * 16 + (lane >> 2) + 8 * i;
        if (row >= run.row_tile.num_rows) {
            continue;
        }
        out_row out = out_row_of(p, run, row);
        float factor = 1.0f;
        if (whole) {
            factor = softmax_close_base2(out.sink, m[i], l[i], (lane & 3) == 0 ? out.lse : nullptr);
        } else if ((lane & 3) == 0) {
            part[64 * D + row] = m[i];
            part[64 * (D + 1) + row] = l[i];
        }
#pragma unroll
        for (int n = 0; n < D / 8; n += near) {
            int d = value_dim<KIND>(n, lane, 0);
            float x[2 * near];
#pragma unroll
            for (int e = 0; e < 2 * near; e++) {
                x[e] = o[n + e % near][2 * i + e / near];
            }
            if (whole) {
                write_values<2 * near>(p, run.head, out.data, d, x, factor * v_scale);
            } else {
#pragma unroll
                for (int e = 0; e < 2 * near; e++) {
                    part[row * D + d + e] = x[e];
                }
            }
        }
    }
}

/* `stage` is the run's last; it is not copied into before this is done. */
template <int KIND, int D, bool SPLIT>
static __device__ __forceinline__ void finish_run(const gpu_params &p, const gpu_run &run,
                                                  char *stage, int32_t *last_one, float (&m)[2],
                                                  float (&l)[2], const float (&o)[D / 8][4])
{
    using S = shape<KIND, D, SPLIT>;
    bool whole = run.count == run.row_tile.num_tiles;
    int32_t slot_step = p.schedule.by_item ? 1 : 2;
    int32_t slot = slot_step * run.segment + (!p.schedule.by_item && run.tile == 0);
    float *part = p.schedule.parts + (int64_t)slot * p.schedule.tile_rows * (D + 2);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        l[i] += __shfl_xor_sync(0xffffffffu, l[i], 1);
        l[i] += __shfl_xor_sync(0xffffffffu, l[i], 2);
    }
    if constexpr (SPLIT) {
        constexpr int round = 2 * S::half / (16 * D) >= 16 ? 16 : 8;
        join_warps<KIND, D, round>(p, run, (float *)stage, (float *)(stage + 2 * S::half), whole,
                                   part, m, l, o);
    } else {
        store_rows<KIND, D>(p, run, whole, part, m, l, o);
    }
    if (whole) {
        return;
    }
    barrier_consumers(); /* the part is written: thread 0 publishes it for all */
    if (threadIdx.x == 0) {
        bool last = add_and_publish(&p.schedule.arrived[run.item], 1) == run.last - run.first;
        if (last) {
            p.schedule.arrived[run.item] = 0; /* for the next run of this plan */
        }
        *last_one = last;
    }
    barrier_consumers();
    if (*last_one) {
        /* Only the first of the parts begins inside its segment, unless that begins the item. */
        int32_t first_slot = slot_step * run.first + (!p.schedule.by_item);
        merge_parts<D, 2 * S::half>(p, run, first_slot, slot_step, stage);
    }
}

#endif
