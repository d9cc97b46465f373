/* SPDX-License-Identifier: Apache-2.0 */
/* The attend on matrix units (XMX) of GPUs whose subgroups for them have 16 lanes. Groups walk
 * segments of the plan's stream of tiles; each subgroup has 16 rows of an item, which are (query,
 * head of the group) of one KV head:
 *   16 rows: 4 subgroups, each 16 keys of a tile of 64.
 *   64 rows: 8 subgroups in two halves; each half has 32 keys of a tile.
 * DPAS is D [8, 16] += A [8, 16] B [16, 16]: lane l has column l of A, B and D
 * (cl_intel_subgroup_matrix_multiply_accumulate). Both products are made transposed, so that a lane
 * has one row of the item from its query to its sums, and no lane needs another's:
 *
 *   scores [keys, rows] = K Q^T
 *     A: 8 keys, whose dims the lanes have. Any order of the depth will do, so a lane loads
 *        neighbouring dims, and a key is one load
 *   sums [dims, rows] = V^T P^T
 *     A: 8 dims of 16 keys, of which a lane has its own: 16 neighbouring bytes
 *     B: the weights as the first product has left them
 *
 * A tile of n keys: 2 * n * D elements read, 4 * n * D * rows FLOPs. */
#ifndef LEVEL_ZERO_ATTEND_H
#define LEVEL_ZERO_ATTEND_H

#include "attend_list.h"
#define GPU_LANES LEVEL_ZERO_LANES
#include "gpu/device/items.h"
#include "gpu/device/visible.h"

#define PAIRS 8 /* pairs in 16 keys */

float8 __attribute__((overloadable))
intel_sub_group_bf16_bf16_matrix_mad_k16(short8 a, int8 b, float8 sum);
float8 __attribute__((overloadable))
intel_sub_group_f16_f16_matrix_mad_k16(short8 a, int8 b, float8 sum);

/* KIND: enum attn_dtype_id of the cache's elements; those of 8 bits become f16. ROW_GROUPS:
 * subgroups of 16 rows each, who read the same keys; SPLITS: subgroups for other keys of a tile. */
template <int KIND_, int D_, int ROW_GROUPS_, int SPLITS_> struct shape {
    static constexpr int kind = KIND_, size = D_, row_groups = ROW_GROUPS_, splits = SPLITS_;
    static constexpr int threads = row_groups * splits * GPU_LANES, rows = 16 * row_groups;
    static constexpr bool bytes = kind >= ATTN_DTYPE_FP8_E4M3;
    static constexpr int element = bytes ? 1 : 2;
    static constexpr int per = size / GPU_LANES; /* neighbouring dims of a lane: 4 or 8 */
    static constexpr int eights = size / 8;
};

/* The shares of the splits, joined (items.h). */
template <class S> struct attend_memory {
    static constexpr int columns = S::size;
    static constexpr int pitch = S::size + 4; /* floats; rows lie in other banks */
    float acc_o[S::rows][pitch];
    float row_max[S::splits][S::rows], row_sum[S::splits][S::rows];
    int32_t number;

    static int32_t dim_of(int32_t round, int32_t column)
    {
        (void)round;
        return column;
    }
};

/* A lane's row: the keys first .. last that it sees, and its sums so far. */
template <class S> struct lane_row {
    int32_t first, last;
    float row_max, row_sum;
    int8 q[S::per];
    float8 acc_o[S::eights];
};

template <class S> GPU_INLINE float8 multiply(short8 a, int8 b, float8 sum)
{
    if (S::kind == ATTN_DTYPE_BF16) {
        return intel_sub_group_bf16_bf16_matrix_mad_k16(a, b, sum);
    }
    return intel_sub_group_f16_f16_matrix_mad_k16(a, b, sum);
}

template <class S> GPU_INLINE uint32_t pack_pair(float low, float high)
{
    if (S::kind == ATTN_DTYPE_BF16) {
        return bf16_of(low) | (uint32_t)bf16_of(high) << 16;
    }
    return half_of(low) | (uint32_t)half_of(high) << 16;
}

/* An element of the queries as the products take it. */
template <class S> GPU_INLINE uint32_t query_bits(const char *at, int32_t d, bool from_bf16)
{
    uint16_t x = ((const uint16_t *)at)[d];
    if (S::bytes && from_bf16) {
        float f = float_of_bf16(x);
        return half_of(isnan(f) ? f : fminf(fmaxf(f, -65504.0f), 65504.0f));
    }
    return x;
}

/* Row `index` of the item; q[i]: of dims per * (2 * j, 2 * j + 1) + i, j = 0 .. 7. Rows that are
 * not there have a query of zeros and see all keys: what comes of them is dropped. */
template <class S>
GPU_INLINE void enter_row_of(const gpu_params &p, const gpu_run &r, int32_t index, lane_row<S> &row)
{
    bool real = index < r.row_tile.num_rows;
    int32_t at = r.row_tile.first_row + (real ? index : 0), token = at / p.problem.group;
    const char *from =
        p.q.data + (int64_t)(r.row_tile.query_start + token) * p.q.row +
        (int64_t)(r.head * p.problem.group + at - token * p.problem.group) * p.q.head;
    gpu_interval s = interval_of(p.problem, request_of_row_tile(r.row_tile), token);
    bool from_bf16 = p.q.dtype == ATTN_DTYPE_BF16;
    row.first = real ? s.first : INT32_MIN;
    row.last = real ? s.last : INT32_MAX;
    row.row_max = -INFINITY;
    row.row_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < S::per; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int32_t low = S::per * 2 * j + i, high = low + S::per;
            uint32_t x = 0;
            if (real && low < p.problem.head_size) {
                x = query_bits<S>(from, low, from_bf16);
            }
            if (real && high < p.problem.head_size) {
                x |= query_bits<S>(from, high, from_bf16) << 16;
            }
            row.q[i][j] = (int)x;
        }
    }
#pragma unroll
    for (int t = 0; t < S::eights; t++) {
        row.acc_o[t] = 0.0f;
    }
}

/* Places of -1: no query sees the key. */
GPU_INLINE key_place find_key(const gpu_params &p, const gpu_run &r, int32_t key, bool scales)
{
    if (key < r.row_tile.k0 || key >= r.row_tile.k1) {
        return {-1, -1, 1.0f, 1.0f};
    }
    int64_t block = r.row_tile.key_start + key, slot = 0;
    if (p.problem.units != nullptr) {
        find_listed(p.problem, r.row_tile.table, key, block, slot);
    } else if (p.problem.paged) {
        int32_t index = key / p.problem.block_size;
        block = p.problem.block_table[r.row_tile.table + index];
        slot = key - index * p.problem.block_size;
    }
    return place_of_key(p, r.head, block, slot, scales);
}

/* `count` neighbouring elements, 4 or 8, as pairs of 16 bits; zeros where `there` is false. */
template <class S, int COUNT>
GPU_INLINE void load_pairs(const char *from, bool there, float scale, uint32_t (&to)[COUNT / 2])
{
    constexpr int words = COUNT * S::element / 4;
    uint32_t raw[words];
#pragma unroll
    for (int i = 0; i < words; i++) {
        raw[i] = 0;
    }
    if (there) {
        if (words == 4) {
            uint4 x = *(const uint4 *)from;
            raw[0] = x.x, raw[1 % words] = x.y, raw[2 % words] = x.z, raw[3 % words] = x.w;
        } else if (words == 2) {
            uint2 x = *(const uint2 *)from;
            raw[0] = x.x, raw[1 % words] = x.y;
        } else {
            raw[0] = *(const uint32_t *)from;
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
        if (S::bytes) {
            uint32_t two = raw[i / 2 % words] >> (i & 1) * 16;
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                uint8_t code = (uint8_t)(two >> e * 8);
                x[e] = scale * (S::kind == ATTN_DTYPE_INT8 ? (float)(int8_t)code
                                                           : float_of_fp8(false, code));
            }
            to[i] = pack_pair<S>(x[0], x[1]);
        } else {
            to[i] = raw[i % words];
        }
    }
}

/* Element i of pairs. */
GPU_INLINE short element_of(const uint32_t *pairs, int i)
{
    return (short)(pairs[i / 2] >> (i & 1) * 16);
}

/* Products of 8 keys from number `first` of the stretch on. */
template <class S>
GPU_INLINE float8 multiply_keys(const gpu_params &p, const char *base, const key_place &at,
                                int first, const lane_row<S> &row)
{
    const int32_t lane = lane_index(), d = lane * S::per;
    uint32_t keys[8][S::per / 2];
    float8 sum = 0.0f;
#pragma unroll
    for (int r = 0; r < 8; r++) {
        int32_t place = lane_read(at.k, first + r);
        load_pairs<S, S::per>(base + ((int64_t)place << 4) + d * S::element,
                              place >= 0 && d < p.problem.head_size, 1.0f, keys[r]);
    }
#pragma unroll
    for (int i = 0; i < S::per; i++) {
        short8 a;
#pragma unroll
        for (int r = 0; r < 8; r++) {
            a[r] = element_of(keys[r], i);
        }
        sum = multiply<S>(a, row.q[i], sum);
    }
    return sum;
}

/* Products as scores in base 2 of the 8 keys from `base` on; -inf where a key is not seen. */
template <class S>
GPU_INLINE float8 score_keys(const gpu_params &p, const key_place &at, float scale, int32_t base,
                             int first, const lane_row<S> &row, float8 s)
{
    s *= scale;
    if (p.k.form == GPU_ROW_SCALED) {
#pragma unroll
        for (int r = 0; r < 8; r++) {
            s[r] *= lane_read(at.k_scale, first + r);
        }
    }
    if (p.problem.soft_cap > 0.0f) {
#pragma unroll
        for (int r = 0; r < 8; r++) {
            s[r] = LOG2E * p.problem.soft_cap * tanhf(s[r] / p.problem.soft_cap);
        }
    }
    if (row.first > base || row.last < base + 7) {
#pragma unroll
        for (int r = 0; r < 8; r++) {
            s[r] = base + r >= row.first && base + r <= row.last ? s[r] : -INFINITY;
        }
    }
    return s;
}

/* A of the t-th 8 dims: those of the lane's own key. */
template <class S>
GPU_INLINE short8 value_part(const gpu_params &p, const char *base, const key_place &at, int t)
{
    uint32_t pairs[4];
    short8 a;
    load_pairs<S, 8>(base + ((int64_t)at.v << 4) + t * 8 * S::element,
                     at.v >= 0 && t * 8 < p.problem.head_size_v, at.v_scale, pairs);
#pragma unroll
    for (int e = 0; e < 8; e++) {
        a[e] = element_of(pairs, e);
    }
    return a;
}

/* Whether the lane's key has a value that is no finite number. */
template <class S>
GPU_INLINE bool has_odd_value(const gpu_params &p, const char *base, const key_place &at)
{
    const int mask = S::kind == ATTN_DTYPE_BF16 ? 0x7f80 : 0x7c00;
    bool odd = false;
#pragma unroll
    for (int t = 0; t < S::eights; t++) {
        short8 a = value_part<S>(p, base, at, t);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            odd |= (a[e] & mask) == mask;
        }
    }
    return odd;
}

/* sums += values x weights where a weight of 0 may meet a value that is no number: a row at a time,
 * of which the values that it does not see are 0. */
template <class S>
GPU_INLINE void add_values_exactly(const gpu_params &p, const char *base, const key_place &at,
                                   uint32_t seen, int8 weights, lane_row<S> &row)
{
    const int32_t lane = lane_index();
#pragma unroll 1
    for (int32_t other = 0; other < 16; other++) {
        short mask = (lane_read(seen, other) >> lane & 1) != 0 ? -1 : 0;
#pragma unroll
        for (int t = 0; t < S::eights; t++) {
            float8 none = 0.0f;
            short8 a = value_part<S>(p, base, at, t) & (short8)mask;
            float8 x = multiply<S>(a, weights, none);
            row.acc_o[t] = lane == other ? row.acc_o[t] + x : row.acc_o[t];
        }
    }
}

/* Online softmax of a stretch of 16 keys: scores become weights, row's row_max, row_sum and acc_o
 * follow. */
template <class S> GPU_INLINE void online_softmax(float8 (&s)[2], lane_row<S> &row)
{
    float high = row.row_max;
#pragma unroll
    for (int r = 0; r < 16; r++) {
        high = fmaxf(high, s[r / 8][r % 8]);
    }
    float base = softmax_base(high);
    if (any_lane(high > row.row_max)) {
        float rescale_o = native_exp2(row.row_max - base);
        row.row_sum *= rescale_o;
#pragma unroll
        for (int t = 0; t < S::eights; t++) {
            row.acc_o[t] *= rescale_o;
        }
        row.row_max = high;
    }
#pragma unroll
    for (int r = 0; r < 16; r++) {
        s[r / 8][r % 8] = native_exp2(s[r / 8][r % 8] - base);
        row.row_sum += s[r / 8][r % 8];
    }
}

/* 16 keys from `base` on. */
template <class S>
GPU_INLINE void attend_keys(const gpu_params &p, const gpu_run &r, float scale, int32_t base,
                            lane_row<S> &row)
{
    const char *k = p.k.data + r.head * p.k.head, *v = p.v.data + r.head * p.v.head;
    key_place at = find_key(p, r, base + lane_index(), S::bytes);
    float8 s[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        s[h] = multiply_keys<S>(p, k, at, 8 * h, row);
        s[h] = score_keys<S>(p, at, scale, base + 8 * h, 8 * h, row, s[h]);
    }
    online_softmax<S>(s, row);
    int8 weights;
    uint32_t seen = 0;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        float low = s[j / 4][j % 4 * 2], high = s[j / 4][j % 4 * 2 + 1];
        weights[j] = (int)pack_pair<S>(low, high);
        seen |= (low != 0.0f ? 1u : 0u) << 2 * j | (high != 0.0f ? 2u : 0u) << 2 * j;
    }
    if (any_lane(seen != 0xffff) && any_lane(has_odd_value<S>(p, v, at))) {
        add_values_exactly<S>(p, v, at, seen, weights, row);
        return;
    }
#pragma unroll
    for (int t = 0; t < S::eights; t++) {
        row.acc_o[t] = multiply<S>(value_part<S>(p, v, at, t), weights, row.acc_o[t]);
    }
}

/* The splits' shares of each row are joined in memory, and written out. */
template <class S>
GPU_INLINE void finish_run(const gpu_params &p, const gpu_run &r, int32_t index, int32_t split,
                           const lane_row<S> &row, attend_memory<S> &memory)
{
    const int32_t thread = (int32_t)thread_index();
    memory.row_max[split][index] = row.row_max;
    memory.row_sum[split][index] = row.row_sum;
    sync_group(); /* all shares are there */
    float high = memory.row_max[0][index];
#pragma unroll
    for (int s = 1; s < S::splits; s++) {
        high = fmaxf(high, memory.row_max[s][index]);
    }
    const float weight = exp2f(row.row_max - softmax_base(high));
#pragma unroll 1
    for (int s = 0; s < S::splits; s++) {
        if (split == s) {
#pragma unroll
            for (int d = 0; d < S::size; d++) {
                float x = weight * row.acc_o[d / 8][d % 8];
                memory.acc_o[index][d] = s == 0 ? x : memory.acc_o[index][d] + x;
            }
        }
        sync_group(); /* a split's share is there */
    }
    write_round<S>(p, r, 0, thread, memory);
    finish_item<S>(p, r, thread, memory);
}

/* All tiles of a run; the subgroup's rows from `row_group` * 16 on, its keys by `split`. */
template <class S>
GPU_INLINE void attend_run(const gpu_params &p, const gpu_run &r, int32_t row_group, int32_t split,
                           attend_memory<S> &memory)
{
    const int32_t keys = LEVEL_ZERO_TILE / S::splits; /* keys in a subgroup's share of a tile */
    const int32_t start = (r.row_tile.k0 & ~(LEVEL_ZERO_TILE - 1)) + r.tile * LEVEL_ZERO_TILE;
    const int32_t index = row_group * 16 + lane_index();
    const float scale = score_scale(p, r.head);
    lane_row<S> row;
    enter_row_of<S>(p, r, index, row);
#pragma unroll 1
    for (int32_t i = 0; i < r.count; i++) {
        int32_t base = start + i * LEVEL_ZERO_TILE + split * keys;
#pragma unroll 1
        for (int32_t sub = 0; sub < keys; sub += 16) {
            attend_keys<S>(p, r, scale, base + sub, row);
        }
    }
    finish_run<S>(p, r, index, split, row, memory);
}

/* One kernel of attend_list.h. */
#define LEVEL_ZERO_ATTEND_KERNEL(kind, KIND, size, rows)                                           \
    using shape_##kind##_##size##_##rows =                                                         \
        shape<ATTN_DTYPE_##KIND, size, (rows) / 16, LEVEL_ZERO_SUBGROUPS(rows) / ((rows) / 16)>;   \
    struct arguments_of_##kind##_##size##_##rows : gpu_params {                                    \
    };                                                                                             \
    __kernel __attribute__((reqd_work_group_size(shape_##kind##_##size##_##rows::threads, 1, 1),   \
                            intel_reqd_sub_group_size(GPU_LANES))) void                            \
        kernel_attend_##kind##_##size##_##rows(const arguments_of_##kind##_##size##_##rows p)      \
    {                                                                                              \
        using S = shape_##kind##_##size##_##rows;                                                  \
        GPU_SHARED attend_memory<S> memory;                                                        \
        const int32_t warp = warp_index();                                                         \
        gpu_walk walk = enter_walk(p);                                                             \
        while (next_run(p, walk, memory)) {                                                        \
            attend_run<S>(p, walk.run, warp % S::row_groups, warp / S::row_groups, memory);        \
        }                                                                                          \
    }

#endif
