/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of keys that an attend reads itself: a producer warp makes the units of an item's list in
 * shared memory, where it finds the keys' slots, as kernel list_keys does in memory. */
#ifndef CUDA_FLASH_SM80_LISTS_CUH
#define CUDA_FLASH_SM80_LISTS_CUH

#include "cuda_flash/ptx/sm90_copy.cuh"
#include "sm80_attend.h"

#define SM80_LIST_LOADS 4 /* a lane's units whose loads wait together */

/* Prefetches to the L2 what the CTA reads one after another before its first keys: its segment, and
 * the list and the request's row of the block table of the item that it has if items are whole and
 * each request has a token. May run before earlier kernels have ended. */
GPU_INLINE void fetch_list(const sm80_params &a)
{
    const gpu_problem &p = a.p.problem;
    const int32_t thread = (int32_t)threadIdx.x, line = 128 / (int32_t)sizeof(int32_t);
    const int32_t token = (int32_t)blockIdx.x / p.num_kv_heads;
    const int32_t list = p.lists > 1 ? (int32_t)blockIdx.x % p.num_kv_heads : 0;
    if (thread == 0) {
        fetch_line(&a.p.schedule.segments[blockIdx.x]);
        fetch_line((const char *)&a.p.schedule.segments[blockIdx.x + 1] - 1);
    }
    if (token >= p.num_tokens || token >= p.num_reqs) {
        return;
    }
    if (thread * line < a.lists.max_entries) {
        fetch_line(a.lists.entries + token * a.lists.entry_token + list * a.lists.entry_list +
                   thread * line);
    }
    if (p.block_table_row == nullptr && thread * line < p.block_table_stride) {
        fetch_line(p.block_table + token * p.block_table_stride + thread * line);
    }
}

/* Makes the units of list `list` of the row tile's token: whole ones in the list's order, then the
 * one that the token sees a part of. Returns the number of keys. */
GPU_INLINE int32_t make_units(const sm80_params &a, const gpu_row_tile &v, int32_t list,
                              int32_t *units, int lane)
{
    const gpu_problem &p = a.p.problem;
    const gpu_list_entries &from = a.lists;
    const int64_t token = v.query_start;
    const int32_t *entries = from.entries + token * from.entry_token + list * from.entry_list;
    const int32_t count =
        from.lengths != nullptr ? from.lengths[token * from.length_token + list] : from.max_entries;
    const int32_t unit = 1 << p.unit_shift, per_entry = from.granularity >> p.unit_shift;
    const int32_t shift = 31 - __clz(per_entry), places = min(count, from.max_entries) << shift;
    const uint32_t before = (1u << lane) - 1;
    int32_t full = 0, cut = -1, cut_keys = 0;
    __syncwarp(); /* the last item's units are read */
#pragma unroll 1
    for (int32_t base = 0; base < places; base += SM80_LIST_LOADS * 32) {
        int32_t slot[SM80_LIST_LOADS], keys[SM80_LIST_LOADS];
#pragma unroll
        for (int t = 0; t < SM80_LIST_LOADS; t++) {
            const int32_t at = base + t * 32 + lane;
            const int32_t entry = at < places ? entries[at >> shift] : -1;
            const int64_t first =
                (int64_t)entry * from.granularity + ((at & (per_entry - 1)) << p.unit_shift);
            keys[t] = entry < 0 || first >= v.seen ? 0 : min(unit, v.seen - (int32_t)first);
            slot[t] = (int32_t)first;
        }
#pragma unroll
        for (int t = 0; t < SM80_LIST_LOADS; t++) {
            const int32_t index = slot[t] / p.block_size;
            if (keys[t] > 0) {
                slot[t] += (p.block_table[v.table + index] - index) * p.block_size;
            }
        }
#pragma unroll
        for (int t = 0; t < SM80_LIST_LOADS; t++) {
            const bool whole = keys[t] == unit;
            const uint32_t all = __ballot_sync(0xffffffffu, whole);
            if (whole) {
                units[full + __popc(all & before)] = slot[t] >> p.unit_shift;
            } else if (keys[t] > 0) { /* in one lane at most, since entries are unique */
                cut = slot[t] >> p.unit_shift;
                cut_keys = keys[t];
            }
            full += __popc(all);
        }
    }
    if (cut >= 0) {
        units[full] = cut;
    }
    cut_keys = __reduce_max_sync(0xffffffffu, cut_keys);
    __syncwarp(); /* the units are written */
    return (full << p.unit_shift) + cut_keys;
}

#endif
