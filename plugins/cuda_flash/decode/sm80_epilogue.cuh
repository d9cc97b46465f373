/* SPDX-License-Identifier: Apache-2.0 */
/* The epilogue of a run: the warps' results are combined and written, as output or, if other CTAs
 * have parts of the item, as a part. The CTA that finishes an item last merges the parts, in a
 * fixed order. */
#ifndef CUDA_FLASH_SM80_EPILOGUE_CUH
#define CUDA_FLASH_SM80_EPILOGUE_CUH

#include "cuda_flash/store_codes.cuh"
#include "sm80_query.cuh"

/* The dim of a column (0 to 7) of column tile n. For 4-bit kinds, the position in a part's row
 * instead. */
template <int KIND, int D = 0, int SWAP = SM80_NO_SWAP> GPU_INLINE int value_dim(int n, int column)
{
    if constexpr (SWAP == SM80_SWAP4 && KIND == KIND_INT4) { /* the order of add_values_int4 */
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

/* The dim at a position of a part's row: column c of a tile belongs to the words of lanes (c, ..),
 * see add_codes in sm80_4bit.cuh. */
template <int KIND, int D> GPU_INLINE int dim_of_place(int place)
{
    return KIND >= KIND_INT4 ? place % 8 * (D / 8) + place / 8 : place;
}

/* The scale of all values of a head; scales of channels are applied in write_values. */
GPU_INLINE float value_scale(const gpu_params &p, int32_t head)
{
    return p.v.form == GPU_ROW_NUMBERS || p.v.form == GPU_ROW_NVFP4 ? cache_scale(p.v, head) : 1.0f;
}

/* Not inlined: rarely used code stays small and out of the loop. */
static __device__ __noinline__ void store_number(char *row, int32_t dtype, int32_t d, float x)
{
    number_store(row, dtype, d, x);
}

/* Writes N neighbouring dims starting with `d`. */
template <int N>
GPU_INLINE void write_values(const gpu_params &p, int32_t head, char *row, int d,
                             const float (&x)[N], float factor)
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

/* Quantizes N neighbouring dims of a lane, starting with `d`. The codes are made from the values
 * that a plain output would get. Not inlined, like store_number. */
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

/* Writes a row that a warp holds, own_dims from lane * own on, times `factor`. int4 undoes its
 * Hadamard transform. */
template <int KIND, int D>
GPU_INLINE void write_row(const gpu_params &p, const gpu_output &output, int32_t head,
                          const out_row &out, int lane, float (&x)[own_dims<D>], float factor)
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
            hadamard_row<D>(x, lane);
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

/* Merges parts first .. last of an item, always in this order, so that the bits are reproducible. A
 * warp has a row: each lane computes the scale of one part of a pass and has `own` dims of all
 * parts. The parts are fetched before their scales are known. Loops are not unrolled, since this
 * code is not in the instruction cache. */
template <int KIND, int D, int SCRATCH>
GPU_INLINE void merge_parts(const gpu_params &p, const gpu_output &output, const gpu_run &run,
                            int32_t first_slot, int32_t slot_step, char *scratch)
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
        float acc_o[own], row_max = -INFINITY, row_sum = 0.0f;
#pragma unroll
        for (int e = 0; e < own; e++) {
            acc_o[e] = 0.0f;
        }
#pragma unroll 1
        for (int32_t base = 0; base < count; base += pass) {
            int32_t here = min(count - base, pass);
            float part_max = -INFINITY, part_sum = 0.0f;
            if (lane < here) {
                const float *at = part_at(base + lane) + p.schedule.tile_rows * D + row;
                part_max = __ldcg(at);
                part_sum = __ldcg(at + p.schedule.tile_rows);
            }
#pragma unroll 2
            for (int32_t i = 0; i < here; i++) {
                const float *from = part_at(base + i) + row * D + lane * own;
#pragma unroll
                for (int e = 0; e < own && has_dims; e += 4) {
                    copy16(shared_address(copy_at(i) + e * 4), from + e, 16);
                }
            }
            float prev_max = row_max;
            row_max = fmaxf(row_max, warp_largest(part_max, false));
            float at = softmax_base(row_max), scores_scale = exp2f(prev_max - at);
            float weight = exp2f(part_max - at);
            row_sum = row_sum * scores_scale + warp_sum(weight * part_sum);
#pragma unroll
            for (int e = 0; e < own; e++) {
                acc_o[e] *= scores_scale;
            }
            wait_for_copies(); /* each thread reads only what it copied itself */
#pragma unroll 4
            for (int32_t i = 0; i < here; i++) {
                float scale = __shfl_sync(0xffffffffu, weight, i);
                const float *x = (const float *)copy_at(i);
#pragma unroll
                for (int e = 0; e < own; e++) {
                    acc_o[e] += scale * x[e];
                }
            }
        }
        out_row out = out_row_of(p, run, row);
        float factor =
            softmax_close_base2(out.sink, row_max, row_sum, lane == 0 ? out.lse : nullptr);
        write_row<KIND, D>(p, output, run.head, out, lane, acc_o, factor * v_scale);
    }
}

/* Combines the results of 4 warps for 16 rows through the run's last stage, ROUND rows at a time.
 * Dims are rotated by 8 for each row, so that neighbouring rows are in different banks. */
template <int KIND, int D, int ROUND, int SWAP>
GPU_INLINE void join_warps(const gpu_params &p, const gpu_output &output, const gpu_run &run,
                           float *scratch, float *max_smem, bool whole, float *part,
                           const float (&row_max)[2], const float (&row_sum)[2],
                           const float (&acc_o)[SWAP ? D / 16 : D / 8][4])
{
    using A = acc_layout<SWAP>;
    constexpr int own = own_dims<D>, most = SWAP ? 8 : 16;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    bool has_dims = lane * own < D; /* D 64: half of the lanes */
    float *sum_smem = max_smem + 64;
    float v_scale = value_scale(p, run.head);
    barrier_consumers(); /* all warps have read the stage */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (A::first_key(lane) == 0) {
            max_smem[warp * 16 + A::row(lane, i)] = row_max[i];
            sum_smem[warp * 16 + A::row(lane, i)] = row_sum[i];
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
            if (SWAP == SM80_SWAP4 && (lane & 2) != 0) {
                break; /* other lanes have the same sums */
            }
            if (SWAP ||
                (8 * i >= first && 8 * i < first + ROUND && 8 * i < run.row_tile.num_rows)) {
                float *to = scratch + (warp * ROUND + row - first) * D;
#pragma unroll
                for (int n = 0; n < (SWAP ? D / 16 : D / 8); n++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        if (A::which(e) == i) {
                            int place = value_dim<KIND, D, SWAP>(A::tile(n, e), A::column(lane, e));
                            to[place ^ ((row & 7) * 8)] = acc_o[n][e];
                        }
                    }
                }
            }
        }
        barrier_consumers(); /* the warps' results are written */
        int rows = min(ROUND, run.row_tile.num_rows - first);
#pragma unroll 1
        for (int r = warp; r < rows; r += 4) { /* one warp for each row */
            int row = first + r;
            float all_max = fmaxf(fmaxf(max_smem[row], max_smem[16 + row]),
                                  fmaxf(max_smem[32 + row], max_smem[48 + row]));
            float base = softmax_base(all_max), all_sum = 0.0f, x[own];
#pragma unroll
            for (int e = 0; e < own; e++) {
                x[e] = 0.0f;
            }
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float scale = exp2f(max_smem[w * 16 + row] - base);
                all_sum += scale * sum_smem[w * 16 + row];
#pragma unroll
                for (int e = 0; e < own && has_dims; e += 4) {
                    float4 y = *(const float4 *)(scratch + (w * ROUND + r) * D +
                                                 ((lane * own + e) ^ ((r & 7) * 8)));
                    x[e] += scale * y.x, x[e + 1] += scale * y.y;
                    x[e + 2] += scale * y.z, x[e + 3] += scale * y.w;
                }
            }
            if (whole) {
                out_row out = out_row_of(p, run, row);
                float factor =
                    softmax_close_base2(out.sink, all_max, all_sum, lane == 0 ? out.lse : nullptr);
                write_row<KIND, D>(p, output, run.head, out, lane, x, factor * v_scale);
                continue;
            }
#pragma unroll
            for (int e = 0; e < own && has_dims; e += 4) {
                *(float4 *)(part + row * D + lane * own + e) =
                    make_float4(x[e], x[e + 1], x[e + 2], x[e + 3]);
            }
            if (lane == 0) {
                part[SM80_ROWS * D + row] = all_max;
                part[SM80_ROWS * (D + 1) + row] = all_sum;
            }
        }
        if (first + ROUND < most) {
            barrier_consumers(); /* the scratch memory is reused */
        }
    }
}

/* Writes the results of a warp that saw all keys: ND column tiles from first_dim on. */
template <int KIND, int D, int ND>
GPU_INLINE void store_rows(const gpu_params &p, const gpu_run &run, bool whole, float *part,
                           int first_dim, const float (&row_max)[2], const float (&row_sum)[2],
                           const float (&acc_o)[ND][4])
{
    constexpr int near = KIND >= KIND_E4M3 ? 2 : 1; /* column tiles with interleaved dims */
    const int lane = threadIdx.x & 31;
    /* this lane writes row_max and row_sum */
    const bool has_sums = first_dim == 0 && (lane & 3) == 0;
    float v_scale = value_scale(p, run.head);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = (lane >> 2) + 8 * i;
        if (row >= run.row_tile.num_rows) {
            continue;
        }
        out_row out = out_row_of(p, run, row);
        float factor = 1.0f;
        if (whole) {
            factor =
                softmax_close_base2(out.sink, row_max[i], row_sum[i], has_sums ? out.lse : nullptr);
        } else if (has_sums) {
            part[SM80_ROWS * D + row] = row_max[i];
            part[SM80_ROWS * (D + 1) + row] = row_sum[i];
        }
#pragma unroll
        for (int n = 0; n < ND; n += near) {
            int d = first_dim + value_dim<KIND>(n, (lane & 3) * 2);
            float x[2 * near];
#pragma unroll
            for (int e = 0; e < 2 * near; e++) {
                x[e] = acc_o[n + e % near][2 * i + e / near];
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

/* Finishes a run. `stage` is its last stage, free for use as scratch memory. */
template <int KIND, int D, int SWAP, int ND>
GPU_INLINE void epilogue(const gpu_params &p, const gpu_output &output, const gpu_run &run,
                         char *stage, int32_t *last_one, float (&row_max)[2], float (&row_sum)[2],
                         const float (&acc_o)[ND][4])
{
    using S = decode_shape<KIND, D>;
    bool whole = run.count == run.row_tile.num_tiles;
    int32_t slot_step = p.schedule.by_item ? 1 : 2;
    int32_t slot = slot_step * run.segment + (!p.schedule.by_item && run.tile == 0);
    float *part = p.schedule.parts + (int64_t)slot * p.schedule.tile_rows * (D + 2);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        row_sum[i] = acc_layout<SWAP>::sum(row_sum[i]);
    }
    if constexpr (S::large_head) {
        const int warp = threadIdx.x >> 5;
        store_rows<KIND, D>(p, run, whole, part, warp * ND * 8, row_max, row_sum, acc_o);
    } else {
        constexpr int round = !SWAP && 2 * S::half / (16 * D) >= 16 ? 16 : 8;
        join_warps<KIND, D, round, SWAP>(p, output, run, (float *)stage,
                                         (float *)(stage + 2 * S::half), whole, part, row_max,
                                         row_sum, acc_o);
    }
    if (whole) {
        return;
    }
    barrier_consumers(); /* all threads have written the part, and thread 0 publishes it */
    if (threadIdx.x == 0) {
        bool last = add_and_publish(&p.schedule.arrived[run.item], 1) == run.last - run.first;
        if (last) {
            p.schedule.arrived[run.item] = 0; /* ready for the next launch of this plan */
        }
        *last_one = last;
    }
    barrier_consumers();
    if (*last_one) {
        /* Only an item's first part can begin inside its segment; the others begin their segments.
         */
        int32_t first_slot = slot_step * run.first + (!p.schedule.by_item);
        merge_parts<KIND, D, 2 * S::half>(p, output, run, first_slot, slot_step, stage);
    }
}

#endif
