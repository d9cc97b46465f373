/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of keys (attn/draft/index_lists.h) as attends read them: units of neighbouring slots that a
 * token sees. A group for each list. */
#include "gpu/device/search.h"
#include "gpu/device/visible.h"

#define LIST_LOADS 4 /* a lane's units whose loads wait together */

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

#define LIST_WARPS (GPU_THREADS_list_keys / GPU_LANES)

GPU_KERNEL(list_keys, gpu_list_params)
{
    GPU_SHARED int32_t of_warps[LIST_WARPS]; /* units of a warp in this pass */
    GPU_SHARED int32_t cut_keys;             /* seen keys of the unit that is cut */
    const gpu_problem &a = p.problem;
    const gpu_list_entries &from = p.from;
    const int32_t lane = lane_index(), warp = warp_index(), unit = 1 << a.unit_shift;
    const int32_t entry_units = from.granularity >> a.unit_shift;
    const int64_t tokens = a.query_start[a.num_reqs] - a.query_start[0];
    let_later_kernels_begin();
    for (int64_t i = group_index(); i < tokens * a.lists; i += group_count()) {
        const int32_t token = a.query_start[0] + (int32_t)(i / a.lists);
        const int32_t list = (int32_t)(i % a.lists);
        const gpu_request q = load_request(a, find_last(a.query_start, a.num_reqs, token));
        const gpu_interval seen = interval_of(a, q, token - q.query_start);
        const int32_t *entries = from.entries + token * from.entry_token + list * from.entry_list;
        const int32_t count = from.lengths != nullptr
                                  ? from.lengths[token * from.length_token + list]
                                  : from.max_entries;
        const int32_t places = min(count, from.max_entries) * entry_units;
        int32_t *units = p.units + i * a.unit_stride;
        int32_t full = 0, cut = -1; /* before the pass; a unit that is cut */
        if (thread_index() == 0) {
            cut_keys = 0;
        }
        for (int32_t base = 0; base < places; base += LIST_LOADS * GPU_THREADS_list_keys) {
            int32_t slot[LIST_LOADS], keys[LIST_LOADS], before[LIST_LOADS], own = 0;
#pragma unroll
            for (int t = 0; t < LIST_LOADS; t++) {
                const int32_t at = base + (warp * LIST_LOADS + t) * GPU_LANES + lane;
                const int32_t entry = at < places ? entries[at / entry_units] : -1;
                const int64_t first = ((int64_t)entry * entry_units + at % entry_units)
                                      << a.unit_shift;
                const bool has = entry >= 0 && first >= seen.first && first <= seen.last;
                keys[t] = !has                            ? 0
                          : first + unit - 1 <= seen.last ? unit
                                                          : (int32_t)(seen.last + 1 - first);
                slot[t] = has ? slot_of(a, q, (int32_t)first) >> a.unit_shift : 0;
            }
#pragma unroll
            for (int t = 0; t < LIST_LOADS; t++) {
                int32_t total;
                before[t] = own + sum_before(keys[t] == unit, &total);
                own += total;
            }
            if (lane == 0) {
                of_warps[warp] = own;
            }
            sync_group(); /* all warps' units are counted */
            int32_t all = 0;
            for (int32_t w = 0; w < LIST_WARPS; w++) {
                full += w < warp ? of_warps[w] : 0;
                all += w < warp ? 0 : of_warps[w];
            }
#pragma unroll
            for (int t = 0; t < LIST_LOADS; t++) {
                if (keys[t] == unit) {
                    units[full + before[t]] = slot[t];
                } else if (keys[t] > 0) { /* in one lane at most, since entries are unique */
                    cut = slot[t];
                    cut_keys = keys[t];
                }
            }
            full += all;
            sync_group(); /* the counts are read, a cut unit is known */
        }
        if (cut >= 0) {
            units[full] = cut;
        }
        sync_group(); /* also without places: cut_keys is written */
        if (thread_index() == 0) {
            p.list_lengths[i] = (full << a.unit_shift) + cut_keys;
        }
    }
}
