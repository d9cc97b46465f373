/* SPDX-License-Identifier: Apache-2.0 */
/* Which keys a query sees, and the bias that positions add to scores. */
#ifndef GPU_DEVICE_VISIBLE_H
#define GPU_DEVICE_VISIBLE_H

#include "gpu/device/target.h"
#include "gpu/params.h"

struct gpu_request {
    int32_t r, query_start, query_len, key_start, length, causal;
};

GPU_INLINE gpu_request request_of_row_tile(const gpu_row_tile &row_tile)
{
    return {row_tile.request,   row_tile.query_start, row_tile.query_len,
            row_tile.key_start, row_tile.length,      row_tile.causal};
}

GPU_INLINE gpu_request load_request(const gpu_problem &p, int32_t r)
{
    gpu_request q;
    q.r = r;
    q.query_start = p.query_start[r];
    q.query_len = p.query_start[r + 1] - q.query_start;
    q.key_start = p.paged ? 0 : p.key_start[r];
    q.length = p.paged ? p.seq_lens[r] : p.key_start[r + 1] - q.key_start;
    q.causal = p.causal_per_request != nullptr ? p.causal_per_request[r] != 0 : p.causal;
    return q;
}

/* The visible keys first .. last of query `index`, by all rules that are an interval. */
struct gpu_interval {
    int32_t first, last, position;
};

GPU_INLINE gpu_interval interval_of(const gpu_problem &p, const gpu_request &q, int32_t index)
{
    gpu_interval v;
    v.position = q.length - q.query_len + index;
    v.first = 0;
    v.last = q.length - 1;
    if (q.causal) {
        v.last = min(v.last, v.position);
    }
    if (p.window_left >= 0) {
        v.first = max(v.first, v.position - p.window_left);
    }
    /* the sum may overflow 32 bits */
    if (p.window_right >= 0 && p.window_right < v.last - v.position) {
        v.last = v.position + p.window_right;
    }
    if (p.chunk_size > 0) {
        int32_t chunk = v.position / p.chunk_size - p.chunk_lookback;
        v.first = max(v.first, max(chunk, 0) * p.chunk_size);
    }
    return v;
}

/* The rules beyond intervals: spans add keys, bits of a tree mask remove some. */
GPU_CALL bool sees_slow(const gpu_problem &p, const gpu_request &q, int32_t index, int32_t position,
                        int32_t j, bool sees)
{
    if (j < 0 || j >= q.length) {
        return false;
    }
    if (p.spans != nullptr && !sees) {
        for (int32_t s = p.span_start[q.r]; s < p.span_start[q.r + 1]; s++) {
            int32_t first = p.spans[2 * s], last = p.spans[2 * s + 1];
            if (position >= first && position <= last && j >= first && j <= last) {
                sees = p.prefix_lm_window == 0 || position - j < p.prefix_lm_window;
                break;
            }
        }
    }
    int32_t column = j - (q.length - q.query_len);
    if (p.tree_mask == ATTN_TREE_BITS && p.tree != nullptr && column >= 0 && sees) {
        const uint32_t *row = (const uint32_t *)p.tree + q.r * p.tree_request + index * p.tree_row;
        sees = row[column / 32] >> (column % 32) & 1;
    }
    return sees;
}

GPU_INLINE float bias_of(const gpu_problem &p, const gpu_request &q, int32_t index,
                         int32_t position, float slope, int32_t j)
{
    float bias = 0.0f;
    int32_t distance = position - j;
    if (p.alibi == ATTN_ALIBI_LINEAR) {
        bias = -slope * (float)abs(distance);
    } else if (p.alibi == ATTN_ALIBI_SQRT) {
        bias = distance >= 0 ? -slope * sqrtf((float)distance) : 0.0f;
    }
    int32_t column = j - (q.length - q.query_len);
    if (p.tree_mask == ATTN_TREE_BIAS && p.tree != nullptr && column >= 0 && column < q.query_len) {
        bias += ((const float *)p.tree + q.r * p.tree_request + index * p.tree_row)[column];
    }
    return bias;
}

GPU_INLINE float cap_score(float s, float cap)
{
    if (!(cap > 0.0f)) {
        return s;
    }
    float e = exp_fast(s * divide_fast(2.0f, cap));
    return cap * (1.0f - divide_fast(2.0f, e + 1.0f));
}

/* The list of a token, `request` of the row tile, becomes the row tile's keys. */
GPU_INLINE void enter_list(const gpu_problem &p, gpu_row_tile &v, int32_t list)
{
    const int64_t at = (int64_t)v.request * p.lists + (p.lists > 1 ? list : 0);
    v.k1 = v.length = same_in_lanes(p.list_lengths[at]);
    v.table = at * p.unit_stride;
}

/* Block and slot of a key in a unit of its list. */
template <class INDEX>
GPU_INLINE void find_in_unit(const gpu_problem &p, int32_t unit, int32_t key, INDEX &block,
                             INDEX &slot)
{
    const int32_t at = (unit << p.unit_shift) | (key & ((1 << p.unit_shift) - 1));
    block = p.paged ? at / p.block_size : at;
    slot = p.paged ? at - block * p.block_size : 0;
}

/* Block and slot of a listed key. */
template <class INDEX>
GPU_INLINE void find_listed(const gpu_problem &p, int64_t table, int32_t key, INDEX &block,
                            INDEX &slot)
{
    find_in_unit(p, p.units[table + (key >> p.unit_shift)], key, block, slot);
}

/* The keys that some query of rows first_row .. end_row - 1 sees. */
GPU_INLINE void key_range(const gpu_problem &p, const gpu_request &q, int32_t first_row,
                          int32_t end_row, int32_t *k0, int32_t *k1)
{
    if (p.spans != nullptr) {
        *k0 = 0;
        *k1 = max(q.length, 0);
        return;
    }
    gpu_interval a = interval_of(p, q, first_row / p.group);
    gpu_interval b = interval_of(p, q, (end_row - 1) / p.group);
    *k0 = max(a.first, 0);
    *k1 = max(b.last + 1, *k0);
}

#endif
