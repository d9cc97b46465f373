/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a run: the warps' shares are joined, and written out or, if other CTAs have parts of
 * the item, left as a part; who finishes last merges the parts in their order. */
#ifndef CUDA_FLASH_SM80_EPILOGUE_CUH
#define CUDA_FLASH_SM80_EPILOGUE_CUH

#include "cuda_flash/store_codes.cuh"
#include "sm80_query.cuh"

/* Dim of a column (0 to 7) of column tile n; of 4-bit kinds its place, as parts of items keep it.
 */
template <int KIND, int D = 0, int FEW = SM80_MANY>
static __device__ __forceinline__ int value_dim(int n, int column)
{
    if constexpr (FEW == SM80_FOUR && KIND == KIND_INT4) { /* add_wide_codes has the dims */
        const int dim = (n >> 2) * 32 + column * 4 + (n & 3);
        return dim % (D / 8) * 8 + dim / (D / 8);
    }
    if constexpr (KIND >= KIND_E4M3 && KIND <= KIND_INT8) {
        return (n >> 1) * 16 + column * 2 + (n & 1);
    }
    if constexpr (KIND == KIND_F32) {
        return (n >> 2) * 32 + column * 4 + (n & 3);
    }
    return n * 8 + column;
}

/* Column c of a tile has the words of lanes (c, ..): add_codes in sm80_4bit.cuh. */
template <int KIND, int D> static __device__ __forceinline__ int dim_of_place(int place)
{
    return KIND >= KIND_INT4 ? place % 8 * (D / 8) + place / 8 : place;
}

struct out_row {
    char *data;
    float *lse;
    float sink; /* base 2; -inf: none */
    int32_t token, head;
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
    v.token = (int32_t)token;
    v.head = head;
    return v;
}

/* What all values of a head are multiplied by; per channel in write_values. */
static __device__ __forceinline__ float value_scale(const gpu_params &p, int32_t head)
{
    return p.v.form == GPU_ROW_NUMBERS || p.v.form == GPU_ROW_NVFP4 ? cache_scale(p.v, head) : 1.0f;
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

template <int N> struct lane_numbers {
    float x[N];
};

/* As a call, like store_number: N neighbouring dims of a lane from `d` on as codes of the numbers
 * that would be written else. */
template <int N>
static __device__ __noinline__ void write_codes(const gpu_params &p, const gpu_output &output,
                                                int32_t kv_head, out_row row, int d,
                                                lane_numbers<N> v, float factor)
{
    bool is_there = d < p.problem.head_size_v;
#pragma unroll
    for (int e = 0; e < N; e++) {
        v.x[e] *= factor;
        if (p.v.form == GPU_ROW_CHANNEL && is_there) {
            v.x[e] *= p.v.channel[(int64_t)kv_head * p.problem.head_size_v + d + e];
        }
        v.x[e] = p.out.dtype == ATTN_DTYPE_BF16  ? float_of_bf16(bf16_of(v.x[e]))
                 : p.out.dtype == ATTN_DTYPE_F16 ? float_of_half(half_of(v.x[e]))
                                                 : v.x[e];
    }
    store_codes(output, row.token, row.head, d, is_there, v.x,
                row.data + (output.form == ATTN_OUTPUT_NVFP4 ? d / 2 : d));
}

/* A row that a warp has, own_dims from lane * own on, times `factor`; int4's is turned back. */
template <int KIND, int D>
static __device__ __forceinline__ void write_row(const gpu_params &p, const gpu_output &output,
                                                 int32_t head, const out_row &out, int lane,
                                                 float (&x)[own_dims<D>], float factor)
{
    constexpr int own = own_dims<D>;
    char *const row = out.data;
    if constexpr (KIND < KIND_INT4 && own <= 8) {
        if (output.form != ATTN_OUTPUT_PLAIN) {
            lane_numbers<own> v;
#pragma unroll
            for (int e = 0; e < own; e++) {
                v.x[e] = x[e];
            }
            write_codes<own>(p, output, head, out, lane * own, v, factor);
            return;
        }
    }
    if constexpr (KIND >= KIND_INT4) {
        if (KIND == KIND_INT4) {
            turn_row<D>(x, lane);
        }
#pragma unroll
        for (int e = 0; e < own && lane * own < D; e++) {
            int d = dim_of_place<KIND, D>(lane * own + e);
            float of_dim = KIND == KIND_INT4 ? factor * turn_factor(p.v, d) : factor;
            store_number(row, p.out.dtype, d, x[e] * of_dim);
        }
    } else if (lane * own < D) {
        write_values<own>(p, head, row, lane * own, x, factor);
    }
}

/* Parts first .. last of an item, always in this order: the same bits every time. A warp has a row:
 * each lane the weight of one part of a pass, and `own` dims of all. What a pass reads is on its
 * way before the weights are known; loops stay rolled, since this code is not in the instruction
 * cache. */
template <int KIND, int D, int SCRATCH>
static __device__ __forceinline__ void merge_parts(const gpu_params &p, const gpu_output &output,
                                                   const gpu_run &run, int32_t first_slot,
                                                   int32_t slot_step, char *scratch)
{
    constexpr int own = own_dims<D>, room = SCRATCH / (128 * own * 4), pass = room < 32 ? room : 32;
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
        write_row<KIND, D>(p, output, run.head, out, lane, o, factor * v_scale);
    }
}

/* The 4 warps' shares of 16 rows through the stage that they have all read; ROUND rows at a time.
 * A row's dims are rotated by 8 per row, so that neighbouring rows stand in other banks. */
template <int KIND, int D, int ROUND, int FEW>
static __device__ __forceinline__ void
join_warps(const gpu_params &p, const gpu_output &output, const gpu_run &run, float *scratch,
           float *sm, bool whole, float *part, const float (&m)[2], const float (&l)[2],
           const float (&o)[FEW ? D / 16 : D / 8][4])
{
    using A = sums_at<FEW>;
    constexpr int own = own_dims<D>, most = FEW ? 8 : 16;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    bool has_dims = lane * own < D; /* D 64: half of the lanes */
    float *sl = sm + 64;
    float v_scale = value_scale(p, run.head);
    barrier_consumers(); /* all warps have read the stage */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (A::first_key(lane) == 0) {
            sm[warp * 16 + A::row(lane, i)] = m[i];
            sl[warp * 16 + A::row(lane, i)] = l[i];
        }
    }
#pragma unroll
    for (int first = 0; first < most; first += ROUND) {
        if (first >= run.row_tile.num_rows) {
            break;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = A::row(lane, i);
            if (FEW == SM80_FOUR && (lane & 2) != 0) {
                break; /* whose sums other lanes have, too */
            }
            if (FEW || (8 * i >= first && 8 * i < first + ROUND && 8 * i < run.row_tile.num_rows)) {
                float *to = scratch + (warp * ROUND + row - first) * D;
#pragma unroll
                for (int n = 0; n < (FEW ? D / 16 : D / 8); n++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        if (A::which(e) == i) {
                            int place = value_dim<KIND, D, FEW>(A::tile(n, e), A::column(lane, e));
                            to[place ^ ((row & 7) * 8)] = o[n][e];
                        }
                    }
                }
            }
        }
        barrier_consumers(); /* the shares are there */
        int rows = min(ROUND, run.row_tile.num_rows - first);
#pragma unroll 1
        for (int r = warp; r < rows; r += 4) { /* a warp has a row */
            int row = first + r;
            float high = fmaxf(fmaxf(sm[row], sm[16 + row]), fmaxf(sm[32 + row], sm[48 + row]));
            float base = softmax_base(high), sum = 0.0f, x[own];
#pragma unroll
            for (int e = 0; e < own; e++) {
                x[e] = 0.0f;
            }
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float f = exp2f(sm[w * 16 + row] - base);
                sum += f * sl[w * 16 + row];
#pragma unroll
                for (int e = 0; e < own && has_dims; e += 4) {
                    float4 y = *(const float4 *)(scratch + (w * ROUND + r) * D +
                                                 ((lane * own + e) ^ ((r & 7) * 8)));
                    x[e] += f * y.x, x[e + 1] += f * y.y;
                    x[e + 2] += f * y.z, x[e + 3] += f * y.w;
                }
            }
            if (whole) {
                out_row out = out_row_of(p, run, row);
                float factor =
                    softmax_close_base2(out.sink, high, sum, lane == 0 ? out.lse : nullptr);
                write_row<KIND, D>(p, output, run.head, out, lane, x, factor * v_scale);
                continue;
            }
#pragma unroll
            for (int e = 0; e < own && has_dims; e += 4) {
                *(float4 *)(part + row * D + lane * own + e) =
                    make_float4(x[e], x[e + 1], x[e + 2], x[e + 3]);
            }
            if (lane == 0) {
                part[16 * D + row] = high;
                part[16 * (D + 1) + row] = sum;
            }
        }
        if (first + ROUND < most) {
            barrier_consumers(); /* the scratch is used again */
        }
    }
}

/* What a warp has of all keys: of 16 rows from first_row on ND column tiles from first_dim on.
 * Parts are of ROWS rows. */
template <int KIND, int D, int ROWS, int ND>
static __device__ __forceinline__ void
store_rows(const gpu_params &p, const gpu_run &run, bool whole, float *part, int first_row,
           int first_dim, const float (&m)[2], const float (&l)[2], const float (&o)[ND][4])
{
    constexpr int near = KIND >= KIND_E4M3 ? 2 : 1; /* column tiles whose dims alternate */
    const int lane = threadIdx.x & 31;
    const bool has_sums = first_dim == 0 && (lane & 3) == 0; /* is the one that writes them */
    float v_scale = value_scale(p, run.head);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = first_row + (lane >> 2) + 8 * i;
        if (row >= run.row_tile.num_rows) {
            continue;
        }
        out_row out = out_row_of(p, run, row);
        float factor = 1.0f;
        if (whole) {
            factor = softmax_close_base2(out.sink, m[i], l[i], has_sums ? out.lse : nullptr);
        } else if (has_sums) {
            part[ROWS * D + row] = m[i];
            part[ROWS * (D + 1) + row] = l[i];
        }
#pragma unroll
        for (int n = 0; n < ND; n += near) {
            int d = first_dim + value_dim<KIND>(n, (lane & 3) * 2);
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
template <int KIND, int D, bool SPLIT, int FEW, int ND>
static __device__ __forceinline__ void
finish_run(const gpu_params &p, const gpu_output &output, const gpu_run &run, char *stage,
           int32_t *last_one, float (&m)[2], float (&l)[2], const float (&o)[ND][4])
{
    using S = shape<KIND, D, SPLIT>;
    bool whole = run.count == run.row_tile.num_tiles;
    int32_t slot_step = p.schedule.by_item ? 1 : 2;
    int32_t slot = slot_step * run.segment + (!p.schedule.by_item && run.tile == 0);
    float *part = p.schedule.parts + (int64_t)slot * p.schedule.tile_rows * (D + 2);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        l[i] = sums_at<FEW>::sum(l[i]);
    }
    const int warp = threadIdx.x >> 5;
    if constexpr (S::wide) {
        store_rows<KIND, D, 16>(p, run, whole, part, 0, warp * ND * 8, m, l, o);
    } else if constexpr (SPLIT) {
        constexpr int round = !FEW && 2 * S::half / (16 * D) >= 16 ? 16 : 8;
        join_warps<KIND, D, round, FEW>(p, output, run, (float *)stage,
                                        (float *)(stage + 2 * S::half), whole, part, m, l, o);
    } else {
        store_rows<KIND, D, 64>(p, run, whole, part, warp * 16, 0, m, l, o);
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
        merge_parts<KIND, D, 2 * S::half>(p, output, run, first_slot, slot_step, stage);
    }
}

#endif
