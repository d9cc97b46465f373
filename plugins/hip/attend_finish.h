/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a run: the splits' shares of each row are joined in LDS, and written out or, if other
 * groups have parts of the item, left as a part; who finishes last merges the parts in their order,
 * so that the result has the same bits every time. */
#ifndef HIP_ATTEND_FINISH_H
#define HIP_ATTEND_FINISH_H

#include "attend_keys.h"
#include "gpu/device/softmax.h"

#if defined(MATRIX_DEPTH)

/* Keys of two tiles and what else a run reads, or a share of the sums with each row's m and l of
 * all splits: a compute unit of CDNA holds two groups, a pair of RDNA's likewise. */
template <class S> struct attend_memory {
    static constexpr int rounds = S::staged && S::size >= 128 ? S::size / 64 : 1;
    static constexpr int round = S::steps / rounds; /* output tiles of a round */
    static constexpr int pitch = 16 * round + 4;    /* floats; rows lie in other banks */
    static constexpr int key_bytes = S::staged ? 2 * S::tile * S::row_bytes : 0;
    static constexpr int input_bytes = key_bytes + S::query_bytes;
    union {
        alignas(16) char input[input_bytes > 0 ? input_bytes : 16]; /* keys, then queries */
        struct {
            alignas(16) float o[S::rows][pitch];
            float m[S::splits][S::rows], l[S::splits][S::rows];
            int32_t number; /* what one thread tells all */
        };
    };
};

struct out_row {
    char *data;
    float *lse;
    float sink; /* base 2; -inf: none */
};

GPU_INLINE out_row out_row_of(const gpu_params &p, const run &r, int32_t row)
{
    int32_t at = r.row_tile.first_row + row, index = at / p.problem.group;
    int64_t token = r.row_tile.query_start + index;
    int32_t head = r.head * p.problem.group + at - index * p.problem.group;
    out_row v;
    v.data = p.out.data + token * p.out.row + head * p.out.head;
    v.lse = p.lse.data != nullptr ? p.lse.data + head * p.lse.head + token * p.lse.row : nullptr;
    v.sink = p.problem.sinks != nullptr ? p.problem.sinks[head] * LOG2E : -INFINITY;
    return v;
}

/* 4 neighbouring dims from `d` on. */
GPU_INLINE void write_values(const gpu_params &p, int32_t head, char *row, int32_t d,
                             const float (&x)[4], float factor)
{
    bool whole = d + 4 <= p.problem.head_size_v && p.v.form != GPU_ROW_CHANNEL;
    factor *= p.v.form == GPU_ROW_NUMBERS ? cache_scale(p.v, head) : 1.0f;
    if (whole && p.out.dtype == ATTN_DTYPE_BF16 && ((uintptr_t)row & 3) == 0) {
        uint32_t *to = (uint32_t *)(row + d * 2);
        to[0] = bf16_of(x[0] * factor) | (uint32_t)bf16_of(x[1] * factor) << 16;
        to[1] = bf16_of(x[2] * factor) | (uint32_t)bf16_of(x[3] * factor) << 16;
        return;
    }
    if (whole && p.out.dtype == ATTN_DTYPE_F16 && ((uintptr_t)row & 3) == 0) {
        uint32_t *to = (uint32_t *)(row + d * 2);
        to[0] = pack_pair<KIND_F16>(x[0] * factor, x[1] * factor);
        to[1] = pack_pair<KIND_F16>(x[2] * factor, x[3] * factor);
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        if (d + e < p.problem.head_size_v) {
            float f = p.v.form == GPU_ROW_CHANNEL
                          ? factor * p.v.channel[(int64_t)head * p.problem.head_size_v + d + e]
                          : factor;
            number_store(row, p.out.dtype, d + e, x[e] * f);
        }
    }
}

/* Parts first .. last of an item, always in this order. */
template <class S>
GPU_INLINE void merge_parts(const gpu_params &p, const run &r, int32_t first_slot,
                            int32_t slot_step)
{
    const int64_t size = (int64_t)S::rows * (S::size + 2), step = slot_step * size;
    const float *zeroth = p.schedule.parts + first_slot * size,
                *rest = p.schedule.parts + r.first * step;
    const int32_t count = r.last - r.first + 1;
#pragma unroll 1
    for (int32_t i = this_thread(); i < r.row_tile.num_rows * (S::size / 4); i += S::threads) {
        int32_t row = i / (S::size / 4), d = i % (S::size / 4) * 4;
        float high = -INFINITY, sum = 0.0f, x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (int32_t n = 0; n < count; n++) {
            const float *part = n == 0 ? zeroth : rest + n * step;
            float m = part[S::rows * S::size + row], l = part[S::rows * (S::size + 1) + row];
            const float *from = part + row * S::size + d;
            float now = fmaxf(high, m), base = softmax_base(now);
            float shrink = exp2f(high - base), weight = exp2f(m - base);
            high = now;
            sum = sum * shrink + weight * l;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[e] = x[e] * shrink + weight * from[e];
            }
        }
        out_row out = out_row_of(p, r, row);
        float factor = softmax_close_base2(out.sink, high, sum, d == 0 ? out.lse : nullptr);
        if (d < p.problem.head_size_v) {
            write_values(p, r.head, out.data, d, x, factor);
        }
    }
}

/* One round's sums in LDS, out to the rows or to a part of them. */
template <class S>
GPU_INLINE void write_round(const gpu_params &p, const run &r, int32_t round, bool whole,
                            float *part, const attend_memory<S> &memory)
{
    using M = attend_memory<S>;
#pragma unroll 1
    for (int32_t i = this_thread(); i < r.row_tile.num_rows * (4 * M::round); i += S::threads) {
        int32_t row = i / (4 * M::round), at = i % (4 * M::round) * 4;
        int32_t t = round * M::round + at % M::round; /* output tile */
        int32_t d = t / S::per * S::pass + at / M::round * S::per + t % S::per;
        const float *from = &memory.o[row][at];
        const float x[4] = {from[0], from[1], from[2], from[3]};
        float high = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int s = 0; s < S::splits; s++) {
            high = fmaxf(high, memory.m[s][row]);
        }
        float base = softmax_base(high);
#pragma unroll
        for (int s = 0; s < S::splits; s++) {
            sum += exp2f(memory.m[s][row] - base) * memory.l[s][row];
        }
        if (!whole) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                part[row * S::size + d + e] = x[e];
            }
            if (d == 0) {
                part[S::rows * S::size + row] = high;
                part[S::rows * (S::size + 1) + row] = sum;
            }
        } else {
            out_row out = out_row_of(p, r, row);
            float factor = softmax_close_base2(out.sink, high, sum, d == 0 ? out.lse : nullptr);
            if (d < p.problem.head_size_v) {
                write_values(p, r.head, out.data, d, x, factor);
            }
        }
    }
}

template <class S>
GPU_INLINE void finish_run(const gpu_params &p, const run &r, int32_t row_warp, int32_t split,
                           float m, float l, const matrix_sum (&o)[S::steps],
                           attend_memory<S> &memory)
{
    using M = attend_memory<S>;
    static_assert(sizeof(M) <= (GPU_LANES == 32 ? 65536 : 32768), "two groups have room");
    static_assert(M::round % 4 == 0 && S::per % 4 == 0, "4 neighbouring dims");
    const int32_t lane = this_lane(), column = lane & 15, row = row_warp * 16 + column;
    const int g = lane >> 4;
    const bool whole = r.count == r.row_tile.num_tiles;
    const int32_t slot_step = p.schedule.by_item ? 1 : 2;
    const int32_t slot = slot_step * r.segment + (!p.schedule.by_item && r.tile == 0);
    float *part = p.schedule.parts + (int64_t)slot * S::rows * (S::size + 2);
    sync_group(); /* nobody reads keys any more */
    if (g == 0) {
        memory.m[split][row] = m;
        memory.l[split][row] = l;
    }
    sync_group(); /* all shares are there */
    float high = memory.m[0][row];
#pragma unroll
    for (int s = 1; s < S::splits; s++) {
        high = fmaxf(high, memory.m[s][row]);
    }
    const float weight = exp2f(m - softmax_base(high));
#pragma unroll
    for (int round = 0; round < M::rounds; round++) {
#pragma unroll
        for (int s = 0; s < S::splits; s++) {
            if (split == s) {
#pragma unroll
                for (int t = 0; t < M::round; t++) {
#pragma unroll
                    for (int e = 0; e < MATRIX_ROWS; e++) {
                        float *to = &memory.o[row][row_of_sum(e, g) * M::round + t];
                        float x = weight * o[round * M::round + t][e];
                        *to = s == 0 ? x : *to + x;
                    }
                }
            }
            sync_group(); /* a split's share is there */
        }
        write_round<S>(p, r, round, whole, part, memory);
        if (round + 1 < M::rounds) {
            sync_group(); /* the memory is used again */
        }
    }
    if (!whole) {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent"); /* each warp's own stores */
        sync_group();                                      /* the part is written */
        if (thread_index() == 0) {
            bool last = add_and_publish(&p.schedule.arrived[r.item], 1) == r.last - r.first;
            if (last) {
                p.schedule.arrived[r.item] = 0; /* for the next run of this plan */
            }
            memory.number = last;
        }
        sync_group(); /* the number is there */
        if (__builtin_amdgcn_readfirstlane(memory.number) != 0) {
            __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent"); /* each warp's own loads */
            /* Only the first of the parts begins inside its segment, unless that begins the item.
             */
            merge_parts<S>(p, r, slot_step * r.first + (!p.schedule.by_item), slot_step);
        }
    }
    sync_group(); /* the memory is used again */
}

#endif
#endif
