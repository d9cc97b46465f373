/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of keys (attn/draft/index_lists.h) as attends read them: units of neighbouring slots that a
 * token sees. A warp for each list. */
#include "gpu/device/search.h"
#include "gpu/device/visible.h"

#define LIST_TURNS 4 /* a warp's turns whose loads wait together */

GPU_INLINE int32_t sum_before(int32_t x, int32_t *total)
{
    int32_t sum = x, lane = lane_index();
    for (int d = 1; d < GPU_LANES; d <<= 1) {
        int32_t other = lane_up(sum, d);
        sum += lane >= d ? other : 0;
    }
    *total = lane_read(sum, GPU_LANES - 1);
    return sum - x;
}

/* The slot of a key, a row's number without a cache. */
GPU_INLINE int32_t slot_of(const gpu_problem &p, const gpu_request &q, int32_t key)
{
    if (!p.paged) {
        return q.key_start + key;
    }
    const int64_t row = p.block_table_row != nullptr ? p.block_table_row[q.r] : q.r;
    const int32_t index = key / p.block_size;
    return p.block_table[row * p.block_table_stride + index] * p.block_size + key -
           index * p.block_size;
}

GPU_KERNEL(list_keys, gpu_list_params)
{
    const gpu_problem &a = p.problem;
    const int32_t lane = lane_index(), unit = 1 << a.unit_shift;
    const int64_t tokens = a.query_start[a.num_reqs] - a.query_start[0];
    let_later_kernels_begin();
    for (int64_t i = warp_of_grid(GPU_THREADS_list_keys); i < tokens * a.lists;
         i += warps_of_grid(GPU_THREADS_list_keys)) {
        const int32_t token = a.query_start[0] + (int32_t)(i / a.lists);
        const int32_t list = (int32_t)(i % a.lists);
        const gpu_request q = load_request(a, find_last(a.query_start, a.num_reqs, token));
        const gpu_interval seen = interval_of(a, q, token - q.query_start);
        const int32_t *entries = p.entries + token * p.entry_token + list * p.entry_list;
        const int32_t count =
            p.lengths != nullptr ? p.lengths[token * p.length_token + list] : p.max_entries;
        const int32_t places = min(count, p.max_entries) * p.entry_units;
        int32_t *units = p.units + i * a.unit_stride;
        int32_t full = 0, cut = -1, cut_keys = 0; /* the unit whose last keys are not seen */
        for (int32_t base = 0; base < places; base += LIST_TURNS * GPU_LANES) {
            int32_t slot[LIST_TURNS], keys[LIST_TURNS]; /* keys that are seen */
#pragma unroll
            for (int t = 0; t < LIST_TURNS; t++) {
                const int32_t at = base + t * GPU_LANES + lane;
                const int32_t entry = at < places ? entries[at / p.entry_units] : -1;
                const int64_t first = ((int64_t)entry * p.entry_units + at % p.entry_units)
                                      << a.unit_shift;
                const bool has = entry >= 0 && first >= seen.first && first <= seen.last;
                keys[t] = !has                            ? 0
                          : first + unit - 1 <= seen.last ? unit
                                                          : (int32_t)(seen.last + 1 - first);
                slot[t] = has ? slot_of(a, q, (int32_t)first) >> a.unit_shift : 0;
            }
#pragma unroll
            for (int t = 0; t < LIST_TURNS; t++) {
                int32_t total;
                const int32_t before = sum_before(keys[t] == unit, &total);
                if (keys[t] == unit) {
                    units[full + before] = slot[t];
                } else if (keys[t] > 0) {
                    cut = slot[t];
                    cut_keys = keys[t];
                }
                full += total;
            }
        }
        if (cut >= 0) { /* in one lane at most, since entries are unique */
            units[full] = cut;
        }
        int32_t rest;
        sum_before(cut_keys, &rest);
        if (lane == 0) {
            p.list_lengths[i] = (full << a.unit_shift) + rest;
        }
    }
}
