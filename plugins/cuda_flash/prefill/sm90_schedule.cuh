/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule of prefill, made by one CTA: the order in which CTAs take items. Items are sorted
 * into sections whose keys fit the L2, and the longest of a section come first. A section may have
 * fewer items than there are multiprocessors, so short items of all sections come last: with them
 * all CTAs end together. */
#ifndef CUDA_FLASH_SM90_SCHEDULE_CUH
#define CUDA_FLASH_SM90_SCHEDULE_CUH

#include "gpu/kernels/cut.h"
#include "sm90_prefill.h"

#define PREFILL_KEYS (PREFILL_SECTIONS * PREFILL_BUCKETS) /* buckets of the sort */
#define PREFILL_SHORT 4 /* a short item has at most this part of the longest's tiles */

struct schedule_memory {
    int32_t warps[32];
    int32_t longest;
    int32_t starts[PREFILL_KEYS];
};

/* Prefix sums of the lengths of requests with row tiles, rounded up to whole tiles where keys are
 * copied. Returns the total. */
GPU_DEVICE int32_t sum_lengths(const prefill_params &a, int32_t row_tiles, int32_t *warps)
{
    int32_t total = 0;
    const gpu_problem &p = a.p.problem;
    const gpu_schedule &plan = a.p.schedule;
    for (int32_t first = 0; first < p.num_reqs; first += PLAN_THREADS) {
        int32_t r = first + thread_index(), length = 0;
        if (r < p.num_reqs) {
            int32_t end = r + 1 < p.num_reqs ? plan.row_tile_start[r + 1] : row_tiles;
            length = end > plan.row_tile_start[r] ? max(load_request(p, r).length, 0) : 0;
            if (a.copies) {
                length = (length + PREFILL_COPY_ROWS - 1) & ~(PREFILL_COPY_ROWS - 1);
            }
        }
        int32_t before = running_sum<PLAN_THREADS>(length, &total, warps);
        if (r < p.num_reqs) {
            a.key_sum[r] = before;
        }
    }
    if (thread_index() == 0) {
        a.key_sum[p.num_reqs] = total;
    }
    sync_group();
    return total;
}

/* The bucket of an item. */
GPU_INLINE int32_t place_of_item(const prefill_params &a, const gpu_row_tile &tile, int32_t head,
                                 int64_t section_keys, int32_t longest)
{
    int64_t keys = (int64_t)a.key_sum[tile.request] * a.p.problem.num_kv_heads +
                   (int64_t)head * max(tile.length, 0);
    int32_t section = (int32_t)min(keys / section_keys, (int64_t)PREFILL_SECTIONS - 2);
    const int32_t seen = PREFILL_SHORT * tile.num_tiles;
    if (seen <= longest && seen <= tile.length / a.p.schedule.tile) {
        section = PREFILL_SECTIONS - 1;
    }
    int32_t bucket = (int32_t)((int64_t)(tile.num_tiles - 1) * PREFILL_BUCKETS / longest);
    return section * PREFILL_BUCKETS + PREFILL_BUCKETS - 1 - bucket;
}

/* The number of parts of each item of a row tile. */
GPU_INLINE int32_t parts_of(const gpu_row_tile &tile, int32_t part_tiles)
{
    return part_tiles > 0 ? (tile.num_tiles + part_tiles - 1) / part_tiles : 1;
}

/* Finds the inner tiles of a row tile: those that need no mask. */
GPU_INLINE void find_inner(const prefill_params &a, prefill_item &item)
{
    const gpu_row_tile &row_tile = item.row_tile;
    const gpu_problem &p = a.p.problem;
    gpu_request request = request_of_row_tile(row_tile);
    gpu_interval from = interval_of(p, request, row_tile.first_row / p.group);
    gpu_interval to =
        interval_of(p, request, (row_tile.first_row + row_tile.num_rows - 1) / p.group);
    int32_t low = max(to.first, 0), high = from.last; /* both grow with the position */
    item.chunk_first = 0;
    if (p.chunk_size > 0) {
        const int32_t chunk = from.position / p.chunk_size;
        item.chunk_first = to.position / p.chunk_size > chunk
                               ? -1
                               : max(chunk - p.chunk_lookback, 0) * p.chunk_size;
    }
    if (p.tree != nullptr) {
        high = min(high, row_tile.length - row_tile.query_len - 1);
    }
    if (p.alibi == ATTN_ALIBI_LINEAR) { /* there all distances have one sign */
        high = min(high, from.position);
    }
    int32_t keys = a.p.schedule.tile, base = row_tile.k0 & ~(keys - 1);
    item.inner_first = max(low - base + keys - 1, 0) / keys;
    item.inner_end = high < base ? 0 : (high + 1 - base) / keys;
}

/* Counts items by bucket and turns the counts into start positions. Returns the number of items. */
GPU_DEVICE int32_t count_items(const prefill_params &a, int32_t row_tiles, int64_t section_keys,
                               int32_t part_tiles, schedule_memory &memory)
{
    const int32_t heads = a.p.problem.num_kv_heads;
    for (int32_t i = thread_index(); i < PREFILL_KEYS; i += PLAN_THREADS) {
        memory.starts[i] = 0;
    }
    sync_group();
    for (int32_t i = thread_index(); i < row_tiles * heads; i += PLAN_THREADS) {
        const gpu_row_tile &tile = a.p.schedule.row_tiles[i / heads];
        atomic_add(&memory.starts[place_of_item(a, tile, i % heads, section_keys, memory.longest)],
                   parts_of(tile, part_tiles));
    }
    sync_group();
    int32_t sum = 0;
    for (int32_t first = 0; first < PREFILL_KEYS; first += PLAN_THREADS) {
        int32_t i = first + thread_index();
        memory.starts[i] = running_sum<PLAN_THREADS>(memory.starts[i], &sum, memory.warps);
    }
    sync_group();
    return sum;
}

/* Writes an item as `parts` parts to positions from `at` on. Parts have whole tiles. Their sizes
 * differ by at most one; the last part, which has the masked tiles, is among the smaller. */
GPU_INLINE void put_item(const prefill_params &a, const gpu_row_tile &row_tile, int32_t head,
                         int32_t parts, int32_t at)
{
    const int32_t keys = a.p.schedule.tile, base = row_tile.k0 & ~(keys - 1);
    for (int32_t i = 0; i < parts; i++) {
        int32_t first = (int32_t)(((int64_t)row_tile.num_tiles * i + parts - 1) / parts);
        int32_t end = (int32_t)(((int64_t)row_tile.num_tiles * (i + 1) + parts - 1) / parts);
        prefill_item item = {end - first, head, row_tile.first_row / a.p.problem.group};
        item.row_tile = row_tile;
        item.row_tile.num_tiles = end - first;
        item.row_tile.k0 = i > 0 ? base + first * keys : row_tile.k0;
        item.row_tile.k1 = i + 1 < parts ? base + end * keys : row_tile.k1;
        item.part = parts > 1 ? at + i + 1 : 0;
        item.parts = parts > 1 ? parts | i << 16 : 0;
        find_inner(a, item);
        a.items[at + i] = item;
    }
}

GPU_DEVICE void schedule_items(const prefill_params &a, schedule_memory &memory)
{
    const gpu_problem &p = a.p.problem;
    const gpu_schedule &plan = a.p.schedule;
    int32_t row_tiles = count_row_tiles(p, plan, memory.warps), all = row_tiles;
    plan_row_tiles(p, plan, &row_tiles, plan.key_tile_start, memory.warps);
    int64_t total = (int64_t)sum_lengths(a, all, memory.warps) * p.num_kv_heads;
    int64_t section_keys = max(a.section_keys, total / (PREFILL_SECTIONS - 1) + 1);
    if (thread_index() == 0) {
        memory.longest = 1;
    }
    sync_group();
    for (int32_t i = thread_index(); i < row_tiles; i += PLAN_THREADS) {
        atomic_max(&memory.longest, plan.row_tiles[i].num_tiles);
    }
    sync_group();
    int32_t part_tiles = a.part_tiles;
    int32_t items = count_items(a, row_tiles, section_keys, part_tiles, memory);
    if (part_tiles > 0 && items > PREFILL_MOST_PARTS) { /* more items than the host counted */
        part_tiles = 0;
        items = count_items(a, row_tiles, section_keys, part_tiles, memory);
    }
    for (int32_t i = thread_index(); i < row_tiles * p.num_kv_heads; i += PLAN_THREADS) {
        int32_t tile = i / p.num_kv_heads, head = i - tile * p.num_kv_heads;
        gpu_row_tile v = plan.row_tiles[tile];
        int32_t place = place_of_item(a, v, head, section_keys, memory.longest);
        int32_t parts = parts_of(v, part_tiles);
        int32_t at = atomic_add(&memory.starts[place], parts);
        if (a.copies) {
            v.key_start = a.key_sum[v.request];
        }
        put_item(a, v, head, parts, at);
    }
    if (thread_index() == 0) {
        *a.header = {items, 0};
    }
}

#endif
