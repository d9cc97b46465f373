/* SPDX-License-Identifier: Apache-2.0 */
/* The attend on matrix units: groups of warps walk segments of the plan's stream of tiles. Rows of
 * one item are (query, head of the group) of one KV head.
 *   16 rows: 4 warps, each 16 or 32 keys of a tile, which it reads itself.
 *   64 rows: 8 warps in two halves; each warp has 16 rows, and each half 32 keys of a tile of 64.
 *            Keys go through LDS, two tiles deep, values through L1.
 * Scores are made transposed, keys x rows, so that a lane has one row: its maximum and sum cost an
 * exchange per 16 keys, and weights are the next product's operand as they are. Queries and sums
 * stay in registers.
 * A tile of n keys: 2 * n * D elements read, 4 * n * D * rows FLOPs. 16 rows are bound by memory,
 * 64 by the matrix units and, near to it, L1. */
#ifndef HIP_ATTEND_H
#define HIP_ATTEND_H

#include "attend_finish.h"

#if defined(MATRIX_DEPTH)

/* Keys first .. last are what the row of a lane's column sees. */
struct lane_row {
    int32_t first, last;
};

GPU_INLINE lane_row enter_row_of(const gpu_params &p, const run &r, int32_t row)
{
    lane_row v = {INT32_MIN, INT32_MAX};
    if (row < r.row_tile.num_rows) { /* others see all: their results are dropped */
        int32_t index = (r.row_tile.first_row + row) / p.problem.group;
        gpu_interval s = interval_of(p.problem, request_of_row_tile(r.row_tile), index);
        v.first = s.first;
        v.last = s.last;
    }
    return v;
}

/* Products of 16 keys with a warp's rows as scores in base 2; -inf where a key is not seen. */
GPU_INLINE matrix_sum score_keys(const gpu_params &p, const lane_row &row, float scale,
                                 int32_t base, int g, const key_place &at, matrix_sum s)
{
    s *= scale;
    if (p.k.form == GPU_ROW_SCALED) {
#pragma unroll
        for (int e = 0; e < MATRIX_ROWS; e++) {
            s[e] *= lane_read(at.k_scale, row_of_sum(e, g));
        }
    }
    if (p.problem.soft_cap > 0.0f) {
#pragma unroll
        for (int e = 0; e < MATRIX_ROWS; e++) {
            s[e] = LOG2E * cap_score(s[e], p.problem.soft_cap);
        }
    }
    if (any_lane(row.first > base || row.last < base + 15)) {
#pragma unroll
        for (int e = 0; e < MATRIX_ROWS; e++) {
            int32_t j = base + row_of_sum(e, g);
            s[e] = j >= row.first && j <= row.last ? s[e] : -INFINITY;
        }
    }
    return s;
}

/* o += values x weights where a weight of 0 may meet a value that is no number: a row at a time, of
 * which the values that it does not see are 0. */
template <class S>
GPU_INLINE void add_values_exactly(const lane_values<S> &v, matrix_sum w, int32_t column, int g,
                                   matrix_sum (&o)[S::steps])
{
    matrix_part weights = part_of_sum < S::kind == KIND_BF16 ? KIND_BF16 : KIND_F16 > (w, g);
    uint32_t seen = 0; /* bits of keys */
#pragma unroll
    for (int e = 0; e < MATRIX_ROWS; e++) {
        seen |= (w[e] != 0.0f ? 1u : 0u) << row_of_sum(e, g);
    }
    seen |= lane_xor(seen, 16);
#if defined(MATRIX_CDNA)
    seen |= lane_xor(seen, 32);
#endif
#pragma unroll 1
    for (int32_t row = 0; row < 16; row++) {
        uint32_t keys = lane_read(seen, row);
        matrix_part mask;
#pragma unroll
        for (int i = 0; i < MATRIX_DEPTH / 2; i++) {
            mask[i] = (keys >> depth_of_part(2 * i, g) & 1 ? 0xffffu : 0) |
                      (keys >> depth_of_part(2 * i + 1, g) & 1 ? 0xffff0000u : 0);
        }
#pragma unroll
        for (int t = 0; t < S::steps; t++) {
            matrix_sum none = 0.0f;
            matrix_sum x = multiply<S::kind>(value_part<S>(v, t) & mask, weights, none);
#pragma unroll
            for (int e = 0; e < MATRIX_ROWS; e++) {
                o[t][e] = column == row ? o[t][e] + x[e] : o[t][e];
            }
        }
    }
}

/* Online softmax of 16 keys: scores become weights, m, l and o follow the new maximum. */
template <class S>
GPU_INLINE void soften(matrix_sum &s, float &m, float &l, matrix_sum (&o)[S::steps])
{
    float high = s[0];
#pragma unroll
    for (int e = 1; e < MATRIX_ROWS; e++) {
        high = fmaxf(high, s[e]);
    }
    high = fmaxf(m, column_largest(high));
    float base = softmax_base(high);
    if (any_lane(high > m)) {
        float shrink = __builtin_amdgcn_exp2f(m - base);
        l *= shrink;
#pragma unroll
        for (int t = 0; t < S::steps; t++) {
            o[t] *= shrink;
        }
        m = high;
    }
#pragma unroll
    for (int e = 0; e < MATRIX_ROWS; e++) {
        s[e] = __builtin_amdgcn_exp2f(s[e] - base);
        l += s[e];
    }
}

/* 16 keys from `base` on, whose pieces are there. */
template <class S>
GPU_INLINE void attend_keys(const gpu_params &p, const run &r, const lane_row &row, float scale,
                            int32_t lane, int32_t base, const key_place &at,
                            const uint4 (&raw)[S::raw], const matrix_part (&q)[S::steps], float &m,
                            float &l, matrix_sum (&o)[S::steps])
{
    const int32_t column = lane & 15;
    const int g = lane >> 4;
    lane_values<S> v;
    matrix_sum s = 0.0f;
    load_values<S>(p, p.v.data + r.head * p.v.head, at, column, g, v);
#pragma unroll
    for (int i = 0; i < S::steps; i++) {
        s = multiply<S::kind>(key_part<S>(raw, i), q[i], s);
    }
    s = score_keys(p, row, scale, base, g, at, s);
    soften<S>(s, m, l, o);
    if (S::bytes && p.v.form == GPU_ROW_SCALED) {
        scale_values<S>(at, g, v);
    }
    bool hidden = false;
#pragma unroll
    for (int e = 0; e < MATRIX_ROWS; e++) {
        hidden |= s[e] == 0.0f;
    }
    if (any_lane(hidden) && values_odd<S>(v)) {
        add_values_exactly<S>(v, s, column, g, o);
        return;
    }
    matrix_part weights = part_of_sum < S::kind == KIND_BF16 ? KIND_BF16 : KIND_F16 > (s, g);
#pragma unroll
    for (int t = 0; t < S::steps; t++) {
        o[t] = multiply<S::kind>(value_part<S>(v, t), weights, o[t]);
    }
}

/* What all scores of a run are multiplied by. */
GPU_INLINE float score_scale(const gpu_params &p, int32_t head)
{
    float scale = p.problem.scale * (p.k.form == GPU_ROW_NUMBERS ? cache_scale(p.k, head) : 1.0f);
    return scale * query_scale(p, head) * (p.problem.soft_cap > 0.0f ? 1.0f : LOG2E);
}

/* Byte of a staged key's chunk: neighbouring keys put the same chunk into other banks. */
template <class S> GPU_INLINE int32_t staged_at(int32_t key, int32_t chunk)
{
    constexpr int most = S::chunks >= 8 ? 7 : S::chunks - 1;
    return key * S::row_bytes + (chunk ^ ((S::chunks >= 8 ? key : key >> 1) & most)) * 16;
}

/* A tile's keys on their way to LDS: a thread's pieces. */
template <class S> struct staging {
    static constexpr int all = HIP_TILE * S::chunks, count = (all + S::threads - 1) / S::threads;
    static constexpr bool full = all % S::threads == 0; /* else the last threads have none */
    uint4 pieces[count];
};

template <class S>
GPU_INLINE void stage_load(const gpu_params &p, const key_finder &finder, const run &r,
                           int32_t base, staging<S> &to)
{
    const char *from = p.k.data + r.head * p.k.head;
    const int32_t bytes = p.problem.head_size * S::element, thread = this_thread();
#pragma unroll
    for (int i = 0; i < staging<S>::count; i++) {
        int32_t at = thread + i * S::threads;
        key_place place = {-1, -1, 1.0f, 1.0f};
        if (staging<S>::full || at < staging<S>::all) {
            place = find_key(p, finder, r, base + at / S::chunks, false);
        }
        to.pieces[i] = load_chunk(from, place.k, at % S::chunks, bytes);
    }
}

template <class S> GPU_INLINE void stage_store(const staging<S> &from, char *to)
{
    const int32_t thread = this_thread();
#pragma unroll
    for (int i = 0; i < staging<S>::count; i++) {
        int32_t at = thread + i * S::threads;
        if (staging<S>::full || at < staging<S>::all) {
            *(uint4 *)(to + staged_at<S>(at / S::chunks, at % S::chunks)) = from.pieces[i];
        }
    }
}

/* All tiles of a run; the warp's rows from `row_warp` * 16 on, its keys by `split`. */
template <class S>
GPU_INLINE void attend_run(const gpu_params &p, const key_finder &finder, const run &r,
                           int32_t row_warp, int32_t split, attend_memory<S> &memory)
{
    const int32_t lane = this_lane(), column = lane & 15;
    const int g = lane >> 4;
    const int32_t keys = p.schedule.tile / S::splits; /* of a warp's share of a tile */
    const int32_t start = (r.row_tile.k0 & ~(p.schedule.tile - 1)) + r.tile * p.schedule.tile;
    const int32_t bytes = p.problem.head_size * S::element;
    const char *k_base = p.k.data + r.head * p.k.head;
    const float scale = score_scale(p, r.head);
    float m = -INFINITY, l = 0.0f;
    matrix_sum o[S::steps];
    matrix_part q[S::steps];
    lane_row row = enter_row_of(p, r, row_warp * 16 + column);
    staging<S> next;
    load_query<S>(p, r, row_warp * 16 + column, g, q);
#pragma unroll
    for (int t = 0; t < S::steps; t++) {
        o[t] = 0.0f;
    }
    if (S::staged) {
        stage_load<S>(p, finder, r, start, next);
        stage_store<S>(next, memory.keys[0]);
    }
#pragma unroll 1
    for (int32_t i = 0; i < r.count; i++) {
        int32_t base = start + i * p.schedule.tile + split * keys;
        if (S::staged) {
            sync_group(); /* this tile's keys are there, and nobody reads the other tile's */
            if (i + 1 < r.count) {
                stage_load<S>(p, finder, r, start + (i + 1) * p.schedule.tile, next);
            }
        }
#pragma unroll 1
        for (int32_t sub = 0; sub < keys; sub += 16) {
            key_place at = find_key(p, finder, r, base + sub + column, S::bytes);
            uint4 raw[S::raw];
#pragma unroll
            for (int n = 0; n < S::raw; n++) {
                int32_t chunk = key_chunk(n, g);
                raw[n] = S::staged
                             ? *(const uint4 *)(memory.keys[i & 1] +
                                                staged_at<S>(split * keys + sub + column, chunk))
                             : load_chunk(k_base, at.k, chunk, bytes);
            }
            attend_keys<S>(p, r, row, scale, lane, base + sub, at, raw, q, m, l, o);
        }
        if (S::staged && i + 1 < r.count) {
            stage_store<S>(next, memory.keys[(i + 1) & 1]);
        }
    }
    finish_run<S>(p, r, row_warp, split, m, column_total(l), o, memory);
}

template <class S>
GPU_INLINE void attend_segment(const gpu_params &p, const key_finder &finder, int32_t index,
                               int32_t row_warp, int32_t split, attend_memory<S> &memory)
{
    const gpu_segment segment = same_in_lanes(&p.schedule.segments[index]);
    int32_t row_tile = segment.row_tile_index, t = segment.begin;
    run r;
    r.row_tile = segment.row_tile;
    r.segment = segment.index;
    while (t < segment.end) {
        int32_t within = t - r.row_tile.start;
        if (within >= r.row_tile.num_tiles * p.problem.num_kv_heads) {
            row_tile++;
            r.row_tile = same_in_lanes(&p.schedule.row_tiles[row_tile]);
            continue;
        }
        r.head = within / r.row_tile.num_tiles;
        r.tile = within - r.head * r.row_tile.num_tiles;
        r.count = min(r.row_tile.num_tiles - r.tile, segment.end - t);
        r.item = row_tile * p.problem.num_kv_heads + r.head;
        r.first = r.tile > 0 ? segment.first : segment.index;
        r.last = r.tile + r.count < r.row_tile.num_tiles ? segment.last : segment.index;
        attend_run<S>(p, finder, r, row_warp, split, memory);
        t += r.count;
    }
}

/* The first segment is the group's own; further ones are taken as groups become free. Who takes the
 * last number puts the counter back. */
template <class S> GPU_INLINE void attend(const gpu_params &p, attend_memory<S> &memory)
{
    const int32_t warp = __builtin_amdgcn_readfirstlane(warp_index());
    const int32_t groups = (int32_t)group_count(),
                  segments = same_in_lanes(&p.schedule.header->segments);
    const key_finder finder = make_finder(p);
    int32_t index = (int32_t)group_index();
    while (index < segments) {
        attend_segment<S>(p, finder, index, warp % S::row_warps, warp / S::row_warps, memory);
        if (segments <= groups) {
            break;
        }
        sync_group(); /* the memory is used again */
        if (thread_index() == 0) {
            int32_t taken = atomic_add(&p.schedule.header->taken, 1);
            if (taken == segments - 1) {
                p.schedule.header->taken = 0;
            }
            memory.number = taken;
        }
        sync_group(); /* the number is there */
        index = groups + __builtin_amdgcn_readfirstlane(memory.number);
        sync_group(); /* all have read it */
    }
}

/* One kernel of attend_list.h. */
#define HIP_ATTEND_KERNEL(kind, KIND, size, rows)                                                  \
    using shape_##kind##_##size##_##rows =                                                         \
        shape<KIND_##KIND, size, (rows) / 16, HIP_ATTEND_WARPS(rows) / ((rows) / 16)>;             \
    extern "C" __attribute__((                                                                     \
        global, amdgpu_flat_work_group_size(shape_##kind##_##size##_##rows::threads,               \
                                            shape_##kind##_##size##_##rows::threads))) void        \
        kernel_attend_##kind##_##size##_##rows(const gpu_params)                                   \
    {                                                                                              \
        GPU_SHARED attend_memory<shape_##kind##_##size##_##rows> memory;                           \
        attend<shape_##kind##_##size##_##rows>(                                                    \
            *(const gpu_params *)__builtin_amdgcn_kernarg_segment_ptr(), memory);                  \
    }

#else
#error "this target has no matrix units that matrix.h knows"
#endif
#endif
