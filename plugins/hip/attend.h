/* SPDX-License-Identifier: Apache-2.0 */
/* The attend on matrix units: groups of warps walk segments of the plan's stream of tiles. Rows of
 * one item are (query, head of the group) of one KV head.
 *   16 rows: 4 warps, each 16, 32 or 64 keys of a tile, which it reads itself.
 *   64 rows: 8 warps in two halves; each warp has 16 rows, and each half 32 keys of a tile of 64.
 *            Keys go through LDS, two tiles deep, values through L1.
 *   On RDNA the two halves of heads over 128 have all keys of a tile, but half of the values' dims.
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

GPU_INLINE lane_row enter_row_of(const gpu_params &p, const gpu_run &r, int32_t row)
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

/* Values that are no numbers go to the sums of the rows that see them, and become 0: their product
 * with the weight 0 of a row that does not would be NaN. */
template <class S>
GPU_INLINE void add_odd_values(const matrix_sum &w, int g, lane_values<S> &v, matrix_sum *acc_o)
{
    constexpr int kind = S::kind == KIND_BF16 ? KIND_BF16 : KIND_F16;
    matrix_sum sees;
#pragma unroll
    for (int e = 0; e < MATRIX_ROWS; e++) {
        sees[e] = w[e] != 0.0f ? 1.0f : 0.0f;
    }
    matrix_part ones = part_of_sum<kind>(sees, g);
#pragma unroll
    for (int t = 0; t < S::pass_steps; t++) {
        __builtin_amdgcn_sched_barrier(0); /* one at a time: registers are few, this is rare */
        matrix_part x = value_part<S>(v, t);
        matrix_sum counts = 0.0f;
#pragma unroll
        for (int i = 0; i < MATRIX_DEPTH / 2; i++) {
            x[i] = count_odd<kind>(x[i]);
        }
        counts = multiply<kind>(x, ones, counts);
#pragma unroll
        for (int e = 0; e < MATRIX_ROWS; e++) {
            acc_o[t][e] += sum_of_odd(counts[e]);
        }
    }
    __builtin_amdgcn_sched_barrier(0);
#pragma unroll
    for (int e = 0; e < MATRIX_DEPTH; e++) {
#pragma unroll
        for (int i = 0; i < S::per / 2; i++) {
            v.rows[e][i] &= ~(odd_of_pair<kind>(v.rows[e][i]) * 0xffffu);
        }
    }
}

/* Online softmax of 16 keys: scores become weights, row_max, row_sum and acc_o follow the new
 * maximum. */
template <class S>
GPU_INLINE void online_softmax(matrix_sum &s, float &row_max, float &row_sum,
                               matrix_sum (&acc_o)[S::steps])
{
    float high = s[0];
#pragma unroll
    for (int e = 1; e < MATRIX_ROWS; e++) {
        high = fmaxf(high, s[e]);
    }
    high = fmaxf(row_max, column_largest(high));
    float base = softmax_base(high);
    if (any_lane(high > row_max)) {
        float rescale_o = __builtin_amdgcn_exp2f(row_max - base);
        row_sum *= rescale_o;
#pragma unroll
        for (int t = 0; t < S::steps; t++) {
            acc_o[t] *= rescale_o;
        }
        row_max = high;
    }
#pragma unroll
    for (int e = 0; e < MATRIX_ROWS; e++) {
        s[e] = __builtin_amdgcn_exp2f(s[e] - base);
        row_sum += s[e];
    }
}

/* acc_o += a pass's values x weights. */
template <class S>
GPU_INLINE void add_values(const gpu_params &p, const key_place &at, int g, const matrix_sum &w,
                           bool hidden, lane_values<S> &v, matrix_sum *acc_o)
{
    constexpr int kind = S::kind == KIND_BF16 ? KIND_BF16 : KIND_F16;
    if (S::bytes && p.v.form == GPU_ROW_SCALED) {
        scale_values<S>(at, g, v);
    }
    if (hidden && values_odd<S>(v)) {
        add_odd_values<S>(w, g, v, acc_o);
    }
    matrix_part weights = part_of_sum<kind>(w, g);
#pragma unroll
    for (int t = 0; t < S::pass_steps; t++) {
        acc_o[t] = multiply<kind>(value_part<S>(v, t), weights, acc_o[t]);
    }
}

/* Where a warp's 16 keys come from. */
struct key_source {
    const char *data;   /* the cache's, for the run's head */
    const char *staged; /* or the tile in LDS */
    int32_t key;        /* the lane's key in it */
};

/* 16 keys from `base` on. */
template <class S>
GPU_INLINE void attend_keys(const gpu_params &p, const gpu_run &r, const lane_row &row, float scale,
                            int32_t base, const key_place &at, const key_source &source,
                            const lane_query<S> &q, const warp_part &warp, float &row_max,
                            float &row_sum, matrix_sum (&acc_o)[S::steps])
{
    const int32_t lane = this_lane(), column = lane & 15, bytes = p.problem.head_size * S::element;
    const int g = lane >> 4;
    const char *values = p.v.data + r.head * p.v.head;
    lane_values<S> v[S::passes];
    matrix_sum s = 0.0f;
    load_values<S>(p, values, at, column, g, warp.dim, v[0]);
#pragma unroll 2 /* parts at a time: registers are few */
    for (int part = 0; part < S::parts; part++) {
        uint4 raw[S::pieces];
#pragma unroll
        for (int n = 0; n < S::pieces; n++) {
            int32_t chunk = key_chunk(part * S::pieces + n, g);
            raw[n] = S::staged
                         ? *(const uint4 *)(source.staged + swizzled<S::chunks>(source.key, chunk))
                         : load_chunk(source.data, at.k, chunk, bytes);
        }
#pragma unroll
        for (int i = 0; i < S::part_products; i++) {
            matrix_part b = query_part<S>(q, warp.row + column, part * S::part_products + i);
            s = multiply<S::kind>(key_part<S>(raw, i), b, s);
        }
    }
#pragma unroll
    for (int pass = 1; pass < S::passes; pass++) {
        load_values<S>(p, values, at, column, g, warp.dim + pass * S::pass, v[pass]);
    }
    s = score_keys(p, row, scale, base, g, at, s);
    online_softmax<S>(s, row_max, row_sum, acc_o);
    bool hidden = false;
#pragma unroll
    for (int e = 0; e < MATRIX_ROWS; e++) {
        hidden |= s[e] == 0.0f;
    }
    hidden = any_lane(hidden);
#pragma unroll
    for (int pass = 0; pass < S::passes; pass++) {
        add_values<S>(p, at, g, s, hidden, v[pass], acc_o + pass * S::pass_steps);
    }
}

/* A tile's keys on their way to LDS: a thread's pieces. */
template <class S> struct staging {
    static constexpr int all = S::tile * S::chunks, count = (all + S::threads - 1) / S::threads;
    static constexpr bool full = all % S::threads == 0; /* else the last threads have none */
    uint4 pieces[count];
};

template <class S>
GPU_INLINE void stage_load(const gpu_params &p, const key_finder &finder, const gpu_run &r,
                           int32_t base, staging<S> &to)
{
    const char *from = p.k.data + r.head * p.k.head;
    const int32_t bytes = p.problem.head_size * S::element, thread = this_thread();
#pragma unroll
    for (int i = 0; i < staging<S>::count; i++) {
        int32_t at = thread + i * S::threads;
        key_place place = find_key(p, finder, r, base + at / S::chunks, false);
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
            *(uint4 *)(to + swizzled<S::chunks>(at / S::chunks, at % S::chunks)) = from.pieces[i];
        }
    }
}

/* All tiles of a run. */
template <class S>
GPU_INLINE void attend_run(const gpu_params &p, const key_finder &finder, const gpu_run &r,
                           const warp_part &warp, attend_memory<S> &memory)
{
    const int32_t lane = this_lane(), column = lane & 15;
    const int g = lane >> 4;
    const int32_t keys = p.schedule.tile / S::splits; /* keys in a warp's share of a tile */
    const int32_t start = (r.row_tile.k0 & ~(p.schedule.tile - 1)) + r.tile * p.schedule.tile;
    const int32_t count = r.row_tile.k1 > r.row_tile.k0 ? r.count : 0; /* else no key is seen */
    const float scale = score_scale(p, r.head) * S::product_scale;
    float row_max = -INFINITY, row_sum = 0.0f;
    matrix_sum acc_o[S::steps];
    lane_query<S> q;
    lane_row row = enter_row_of(p, r, warp.row + column);
    staging<S> next;
    load_query<S>(p, r, warp.row + column, g, warp.split == 0 && warp.dim == 0,
                  memory.input + attend_memory<S>::key_bytes, q);
#pragma unroll
    for (int t = 0; t < S::steps; t++) {
        acc_o[t] = 0.0f;
    }
    if (!S::staged && S::query_bytes > 0) {
        sync_group(); /* the queries are there */
    }
    if (S::staged && count > 0) {
        stage_load<S>(p, finder, r, start, next);
        stage_store<S>(next, memory.input);
    }
#pragma unroll 1
    for (int32_t i = 0; i < count; i++) {
        int32_t base = start + i * p.schedule.tile + warp.split * keys;
        if (S::staged) {
            sync_group(); /* this tile's keys are there, and no wave reads the other tile's */
            if (i + 1 < count) {
                stage_load<S>(p, finder, r, start + (i + 1) * p.schedule.tile, next);
            }
        }
#pragma unroll 1
        for (int32_t sub = 0; sub < keys; sub += 16) {
            const int32_t column = this_lane() & 15;
            key_place at = find_key(p, finder, r, base + sub + column, S::bytes);
            key_source source = {p.k.data + r.head * p.k.head,
                                 memory.input + (i & 1) * S::tile * S::row_bytes,
                                 warp.split * keys + sub + column};
            attend_keys<S>(p, r, row, scale, base + sub, at, source, q, warp, row_max, row_sum,
                           acc_o);
        }
        if (S::staged && i + 1 < count) {
            stage_store<S>(next, memory.input + ((i + 1) & 1) * S::tile * S::row_bytes);
        }
    }
    finish_run<S>(p, r, warp, row_max, column_total(row_sum), acc_o, memory);
}

template <class S> GPU_INLINE void attend(const gpu_params &p, attend_memory<S> &memory)
{
    const warp_part warp = part_of_warp<S>(__builtin_amdgcn_readfirstlane(warp_index()));
    const key_finder finder = make_finder(p);
    gpu_walk walk = enter_walk(p);
    while (next_run(p, walk, memory)) {
        attend_run<S>(p, finder, walk.run, warp, memory);
    }
}

/* One kernel of attend_list.h; tests/hip/fibres.h enters them otherwise. */
#if defined(__HIP__)
#define HIP_ATTEND_KERNEL(kind, KIND, size, rows)                                                  \
    using shape_##kind##_##size##_##rows =                                                         \
        shape<KIND_##KIND, size, (rows) / 16, HIP_ATTEND_WARPS(rows)>;                             \
    extern "C"                                                                                     \
        __attribute__((global, amdgpu_waves_per_eu(2),                                             \
                       amdgpu_flat_work_group_size(shape_##kind##_##size##_##rows::threads,        \
                                                   shape_##kind##_##size##_##rows::threads))) void \
            kernel_attend_##kind##_##size##_##rows(const gpu_params)                               \
    {                                                                                              \
        GPU_SHARED attend_memory<shape_##kind##_##size##_##rows> memory;                           \
        attend<shape_##kind##_##size##_##rows>(                                                    \
            *(const gpu_params *)__builtin_amdgcn_kernarg_segment_ptr(), memory);                  \
    }
#endif

#else
#error "this target has no matrix units that matrix.h knows"
#endif
#endif
