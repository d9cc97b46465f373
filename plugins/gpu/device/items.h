/* SPDX-License-Identifier: Apache-2.0 */
/* What attends on matrix units share: the walk of a schedule's segments by the groups of a launch,
 * and the end of each item. S is a kernel's shape: rows of an item, size of a head, threads of a
 * group, splits (warps with other keys of one tile). M is the memory of its group:
 *   number             what one thread tells all
 *   m, l [splits][rows] each row's largest score (base 2) and sum
 *   o [rows][pitch]    weighted values of one round, M::columns of them; M::dim_of says which */
#ifndef GPU_DEVICE_ITEMS_H
#define GPU_DEVICE_ITEMS_H

#include "gpu/device/run.h"
#include "gpu/device/visible.h"

/* A lane's key of a stretch of 16: where its rows lie, in 16 bytes. */
struct key_place {
    int32_t k, v;
    float k_scale, v_scale; /* scales of rows that have their own, else 1 */
};

/* With scales only where they are wanted. */
GPU_INLINE key_place place_of_key(const gpu_params &p, int32_t head, int64_t block, int64_t slot,
                                  bool scales)
{
    key_place at = {(int32_t)((block * p.k.block + slot * p.k.slot) >> 4),
                    (int32_t)((block * p.v.block + slot * p.v.slot) >> 4), 1.0f, 1.0f};
    if (scales && p.k.form == GPU_ROW_SCALED) {
        at.k_scale = *row_scale_at(p.k, block, slot, head);
    }
    if (scales && p.v.form == GPU_ROW_SCALED) {
        at.v_scale = *row_scale_at(p.v, block, slot, head);
    }
    return at;
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
        to[0] = half_of(x[0] * factor) | (uint32_t)half_of(x[1] * factor) << 16;
        to[1] = half_of(x[2] * factor) | (uint32_t)half_of(x[3] * factor) << 16;
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
GPU_INLINE void merge_parts(const gpu_params &p, const gpu_run &r, int32_t first_slot,
                            int32_t slot_step, int32_t thread)
{
    const int64_t size = (int64_t)S::rows * (S::size + 2), step = slot_step * size;
    const float *zeroth = p.schedule.parts + first_slot * size,
                *rest = p.schedule.parts + r.first * step;
    const int32_t count = r.last - r.first + 1;
#pragma unroll 1
    for (int32_t i = thread; i < r.row_tile.num_rows * (S::size / 4); i += S::threads) {
        int32_t row = i / (S::size / 4), d = i % (S::size / 4) * 4;
        float high = -INFINITY, sum = 0.0f, x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (int32_t n = 0; n < count; n++) {
            const float *part = n == 0 ? zeroth : rest + n * step;
            float row_max = part[S::rows * S::size + row],
                  row_sum = part[S::rows * (S::size + 1) + row];
            const float *from = part + row * S::size + d;
            float now = fmaxf(high, row_max), base = softmax_base(now);
            float scale = exp2f(high - base), weight = exp2f(row_max - base);
            high = now;
            sum = sum * scale + weight * row_sum;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[e] = x[e] * scale + weight * from[e];
            }
        }
        out_row out = out_row_of(p, r, row);
        float factor = softmax_close_base2(out.sink, high, sum, d == 0 ? out.lse : nullptr);
        if (d < p.problem.head_size_v) {
            write_values(p, r.head, out.data, d, x, factor);
        }
    }
}

/* A part of an item, in floats: acc_o [rows][size], row_max [rows], row_sum [rows]. */
template <class S> GPU_INLINE float *part_of_run(const gpu_params &p, const gpu_run &r)
{
    return p.schedule.parts + (int64_t)slot_of_run(p, r) * S::rows * (S::size + 2);
}

/* Whether the run is all of its item. */
GPU_INLINE bool is_whole(const gpu_run &r)
{
    return r.count == r.row_tile.num_tiles;
}

/* One round's sums in the group's memory, out to the rows or to a part of them. */
template <class S, class M>
GPU_INLINE void write_round(const gpu_params &p, const gpu_run &r, int32_t round, int32_t thread,
                            const M &memory)
{
    float *part = part_of_run<S>(p, r);
#pragma unroll 1
    for (int32_t i = thread; i < r.row_tile.num_rows * (M::columns / 4); i += S::threads) {
        int32_t row = i / (M::columns / 4), at = i % (M::columns / 4) * 4;
        int32_t d = M::dim_of(round, at);
        const float x[4] = {memory.acc_o[row][at], memory.acc_o[row][at + 1],
                            memory.acc_o[row][at + 2], memory.acc_o[row][at + 3]};
        float high = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int s = 0; s < S::splits; s++) {
            high = fmaxf(high, memory.row_max[s][row]);
        }
        float base = softmax_base(high);
#pragma unroll
        for (int s = 0; s < S::splits; s++) {
            sum += exp2f(memory.row_max[s][row] - base) * memory.row_sum[s][row];
        }
        if (!is_whole(r)) {
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

/* After the last round. Of an item that other groups have parts of, too, who comes last merges all
 * parts in their order, so that the result has the same bits every time. */
template <class S, class M>
GPU_INLINE void finish_item(const gpu_params &p, const gpu_run &r, int32_t thread, M &memory)
{
    const int32_t slot_step = p.schedule.by_item ? 1 : 2;
    if (!is_whole(r)) {
        release_stores(); /* each warp's own */
        sync_group();     /* the part is written */
        if (thread_index() == 0) {
            bool last = add_and_publish(&p.schedule.arrived[r.item], 1) == r.last - r.first;
            if (last) {
                p.schedule.arrived[r.item] = 0; /* for the next run of this plan */
            }
            memory.number = last;
        }
        sync_group(); /* the number is there */
        if (same_in_lanes(memory.number) != 0) {
            acquire_loads(); /* each warp's own */
            /* Only the first of the parts begins inside its segment, unless that begins the item.
             */
            merge_parts<S>(p, r, slot_step * r.first + (!p.schedule.by_item), slot_step, thread);
        }
    }
    sync_group(); /* the memory is used again */
}

/* Where a group is in its segments, and the run that it is to do. */
struct gpu_walk {
    gpu_run run;
    gpu_segment segment;
    int32_t segments, number; /* segments of the launch; the group's one */
    int32_t row_tile, next;   /* the run's; the first tile after it */
};

GPU_INLINE void enter_segment(const gpu_params &p, gpu_walk &w)
{
    w.segment = same_in_lanes(p.schedule.segments[w.number]);
    w.run.row_tile = w.segment.row_tile;
    w.run.segment = w.segment.index;
    w.row_tile = w.segment.row_tile_index;
    w.next = w.segment.begin;
}

/* The first segment is the group's own. */
GPU_INLINE gpu_walk enter_walk(const gpu_params &p)
{
    gpu_walk w;
    w.segments = same_in_lanes(p.schedule.header->segments);
    w.number = (int32_t)group_index();
    w.next = w.segment.end = 0;
    if (w.number < w.segments) {
        enter_segment(p, w);
    }
    return w;
}

/* Further ones are taken as groups become free. Who takes the last number puts the counter back.
 * False: there is none. */
template <class M> GPU_INLINE bool take_segment(const gpu_params &p, gpu_walk &w, M &memory)
{
    const int32_t groups = (int32_t)group_count();
    if (w.segments <= groups) {
        return false;
    }
    sync_group(); /* the memory is used again */
    if (thread_index() == 0) {
        int32_t taken = atomic_add(&p.schedule.header->taken, 1);
        if (taken == w.segments - 1) {
            p.schedule.header->taken = 0;
        }
        memory.number = taken;
    }
    sync_group(); /* the number is there */
    w.number = groups + same_in_lanes(memory.number);
    sync_group(); /* all have read it */
    if (w.number >= w.segments) {
        return false;
    }
    enter_segment(p, w);
    return true;
}

/* The next run of the group; false: it has done all. */
template <class M> GPU_INLINE bool next_run(const gpu_params &p, gpu_walk &w, M &memory)
{
    gpu_run &r = w.run;
    if (w.number >= w.segments || (w.next >= w.segment.end && !take_segment(p, w, memory))) {
        return false;
    }
    while (w.next - r.row_tile.start >= r.row_tile.num_tiles * p.problem.num_kv_heads) {
        w.row_tile++;
        r.row_tile = same_in_lanes(p.schedule.row_tiles[w.row_tile]);
    }
    const int32_t within = w.next - r.row_tile.start;
    r.head = within / r.row_tile.num_tiles;
    r.tile = within - r.head * r.row_tile.num_tiles;
    r.count = min(r.row_tile.num_tiles - r.tile, w.segment.end - w.next);
    r.item = w.row_tile * p.problem.num_kv_heads + r.head;
    if (p.problem.units != nullptr) {
        enter_list(p.problem, r.row_tile, r.head);
    }
    r.first = r.tile > 0 ? w.segment.first : w.segment.index;
    r.last = r.tile + r.count < r.row_tile.num_tiles ? w.segment.last : w.segment.index;
    w.next += r.count;
    return true;
}

#endif
