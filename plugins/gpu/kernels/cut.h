/* SPDX-License-Identifier: Apache-2.0 */
/* The cuts of a schedule: prefix sums of the tiles of each (request, row tile), and the segments
 * into which the stream of tiles is cut. Runs in one CTA, or in as many threads of a test. */
#ifndef GPU_KERNELS_CUT_H
#define GPU_KERNELS_CUT_H

#include "gpu/device/scan.h"
#include "gpu/device/search.h"
#include "gpu/device/visible.h"
#include "gpu/least_part.h"

#ifndef PLAN_THREADS
#define PLAN_THREADS GPU_THREADS_plan
#endif
#define PLAN_ROW_TILES 4096 /* prefix sums of so many row tiles fit into shared memory */
#define PLAN_SEGMENTS 4096  /* segments that fit into shared memory */
#define PLAN_CHUNKS 512     /* row tiles that can be cut into chunks of items */
#define SHORT_ITEM 1536     /* keys up to which an item is not cut */
#define LISTED_ITEM 4096    /* as SHORT_ITEM, of lists: each part has to find its own */
#define LEAST_REST 3        /* tiles of a segment that is drawn */
#define REST_OF_SHARE 3     /* 1 / 2^3 of a share is drawn instead of assigned */
#define CHUNK_SLACK 16      /* a chunk may exceed a CTA's equal share by 1 / 16 */
#define MOST_PARTS 32       /* parts of an item that chunks are made of, if there are few items */
#define LEAST_SHARE 12      /* tiles of a CTA from which on segments are drawn */
/* tiles above an equal share: the cost of another piece and its merge */
#define MOST_SHARE_SLACK 6
/* CTAs for each item; with fewer items each would have too many parts */
#define LEAST_ITEMS 6
/* by_item 2, in tiles: what cuts of items cost, and how much more if every group leaves a part */
#define CUTS_COST 2
#define PARTS_COST 10

struct plan_memory {
    int32_t warps[GPU_LANES];
    int32_t key_tile_start[PLAN_ROW_TILES + 1];
    int32_t segment_begin[PLAN_SEGMENTS + 1];
    int32_t chunk_start[PLAN_CHUNKS];
};

/* What the schedule counts as requests: with lists, each token. */
GPU_INLINE int32_t count_requests(const gpu_problem &p)
{
    return p.listed > 0 ? p.num_tokens : p.num_reqs;
}

GPU_DEVICE gpu_request request_of_schedule(const gpu_problem &p, int32_t r)
{
    if (p.listed <= 0) {
        return load_request(p, r);
    }
    const int32_t token = p.query_start[0] + r;
    gpu_request q = load_request(p, find_last(p.query_start, p.num_reqs, token));
    const int32_t index = token - q.query_start;
    const bool real = index < q.query_len;
    const int32_t seen = real ? interval_of(p, q, index).last + 1 : 0;
    return {q.r, token, real, 0, max(seen, 0), 0};
}

GPU_DEVICE gpu_row_tile row_tile_of(const gpu_problem &p, const gpu_schedule &plan,
                                    int32_t row_tile, int32_t r)
{
    gpu_request q = request_of_schedule(p, r);
    gpu_row_tile v = {};
    v.first_row = (row_tile - plan.row_tile_start[r]) * plan.tile_rows;
    v.num_rows = min(plan.tile_rows, q.query_len * p.group - v.first_row);
    if (p.topk > 0 || p.listed > 0) {
        v.k0 = 0, v.k1 = p.listed > 0 ? min(q.length, p.listed) : p.topk;
    } else {
        key_range(p, q, v.first_row, v.first_row + v.num_rows, &v.k0, &v.k1);
    }
    v.num_tiles = (v.k1 - (v.k0 & ~(plan.tile - 1)) + plan.tile - 1) / plan.tile;
    v.num_tiles = max(v.num_tiles, 1); /* an item without keys still writes its rows */
    v.query_start = q.query_start;
    v.query_len = q.query_len;
    v.key_start = q.key_start;
    v.length = v.seen = q.length;
    v.causal = q.causal;
    v.request = r;
    v.table = (int64_t)(p.block_table_row != nullptr ? p.block_table_row[q.r] : q.r) *
              p.block_table_stride;
    return v;
}

/* The number of parts of a row tile's items. Batch-invariant: GPU_INVARIANT_CUTS if one row tile
 * has all of a request's rows, else 1; with a prefix cache too 1, since other rows of the request
 * may be in the cache already. Otherwise parts are at most a CTA's share; there are fewer
 * than 4 for each CTA, since only items larger than a share are cut. */
GPU_DEVICE int32_t cut_count(const gpu_problem &p, const gpu_schedule &plan,
                             const gpu_row_tile &row_tile, int32_t share)
{
    if (plan.invariant >= 1) {
        bool single = plan.invariant == 1 && row_tile.query_len * p.group <= plan.tile_rows;
        return single ? min(row_tile.num_tiles, GPU_INVARIANT_CUTS) : 1;
    }
    return (row_tile.num_tiles + share - 1) / share;
}

/* Fast prefill: whether one of the row tile's rows belongs to a requested token. */
GPU_DEVICE bool is_wanted(const gpu_problem &p, const gpu_row_tile &row_tile)
{
    int32_t first = row_tile.query_start + row_tile.first_row / p.group;
    int32_t last = row_tile.query_start + (row_tile.first_row + row_tile.num_rows - 1) / p.group;
    for (int32_t i = 0; i < p.num_wanted_rows; i++) {
        if (p.wanted_rows[i] >= first && p.wanted_rows[i] <= last) {
            return true;
        }
    }
    return false;
}

/* Writes all row tiles that are needed; returns the number of their tiles. */
GPU_DEVICE int32_t plan_row_tiles(const gpu_problem &p, const gpu_schedule &plan,
                                  int32_t *row_tiles, int32_t *starts, int32_t *warps)
{
    int32_t total = 0, kept = 0, requests = count_requests(p);
    for (int32_t first = 0; first < *row_tiles; first += PLAN_THREADS) {
        int32_t row_tile = first + thread_index(), last = min(row_tile, *row_tiles - 1);
        gpu_row_tile v = row_tile_of(p, plan, last, find_last(plan.row_tile_start, requests, last));
        bool keep = row_tile == last && (p.wanted_rows == nullptr || is_wanted(p, v));
        int32_t tiles = keep ? v.num_tiles * p.num_kv_heads : 0;
        if (p.wanted_rows != nullptr) {
            row_tile = running_sum<PLAN_THREADS>(keep, &kept, warps);
        }
        v.start = running_sum<PLAN_THREADS>(tiles, &total, warps);
        if (keep) {
            plan.row_tiles[row_tile] = v;
            starts[row_tile] = v.start;
        }
    }
    *row_tiles = p.wanted_rows != nullptr ? kept : *row_tiles;
    if (thread_index() == 0) {
        starts[*row_tiles] = total;
    }
    sync_group();
    return total;
}

/* Segments of one item each. Items with several parts come first: only they have parts in memory.
 */
GPU_DEVICE int32_t cut_items(const gpu_problem &p, const gpu_schedule &plan, int32_t row_tiles,
                             int32_t total, int32_t *warps)
{
    int32_t segments = 0, share = max(total / plan.ctas, GPU_LEAST_PART);
    for (int32_t pass = 0; pass < 2; pass++) {
        for (int32_t first = 0; first < row_tiles; first += PLAN_THREADS) {
            int32_t row_tile = first + thread_index(), cuts = 0;
            const gpu_row_tile &v = plan.row_tiles[min(row_tile, row_tiles - 1)];
            if (row_tile < row_tiles) {
                cuts = cut_count(p, plan, v, share);
                cuts = (cuts > 1) == (pass == 0) ? cuts : 0;
            }
            int32_t at = running_sum<PLAN_THREADS>(cuts * p.num_kv_heads, &segments, warps);
            for (int32_t i = 0; i < cuts * p.num_kv_heads; i++) {
                int32_t head = i / cuts, cut = i - head * cuts;
                gpu_segment &s = plan.segments[at + i];
                s.begin =
                    v.start + head * v.num_tiles + (int32_t)((int64_t)v.num_tiles * cut / cuts);
                s.end = v.start + head * v.num_tiles +
                        (int32_t)((int64_t)v.num_tiles * (cut + 1) / cuts);
                s.index = at + i;
                s.row_tile_index = row_tile;
                s.row_tile = v;
                s.first = at + head * cuts;
                s.last = s.first + cuts - 1;
            }
        }
    }
    return segments;
}

/* Whether one of the shares, which begin at every `step`-th of `begin`, has more tiles than `most`.
 */
GPU_DEVICE bool is_share_longer(const int32_t *begin, int32_t step, int32_t shares, int32_t most,
                                int32_t *warps)
{
    int32_t longer = 0;
    for (int32_t first = 0; first < shares; first += PLAN_THREADS) {
        const int32_t i = first + thread_index();
        running_sum<PLAN_THREADS>(i < shares && begin[(i + 1) * step] - begin[i * step] > most,
                                  &longer, warps);
    }
    return longer > 0;
}

/* Finds where the shares of a group begin, with concurrent row tiles counted as one; returns their
 * number. Items stay whole if there is a group for each and no item exceeds an equal share by more
 * than what cuts cost. A cut moves to the nearest boundary of equal parts of its item, as many as
 * the item has shares: then most items are whole or cut alike, and no share exceeds the others by
 * more than a slack. If one would, shares are equal. Shares without tiles are left out. */
GPU_DEVICE int32_t begin_shares(const gpu_schedule &plan, int32_t row_tiles, int32_t total,
                                const int32_t *starts, plan_memory &memory)
{
    int32_t *begin = memory.segment_begin, concurrent = plan.concurrent, kept = 0;
    int32_t shares =
        min(max(plan.ctas / concurrent, 1), (total + plan.least_share - 1) / plan.least_share);
    int32_t share = total / shares, columns = row_tiles / concurrent;
    if (columns <= min(plan.ctas / concurrent, PLAN_SEGMENTS)) {
        for (int32_t i = thread_index(); i <= columns; i += PLAN_THREADS) {
            begin[i] = starts[i * concurrent] / concurrent;
        }
        sync_group();
        const int32_t cost = CUTS_COST + PARTS_COST * shares * concurrent / plan.ctas;
        if (!is_share_longer(begin, 1, columns, share + cost, memory.warps)) {
            return columns;
        }
    }
    int32_t most = share + min(max(share / CHUNK_SLACK, plan.least_share), MOST_SHARE_SLACK);
    auto equal = [&](int32_t i) { return (int32_t)((int64_t)total * i / shares); };
    for (int32_t i = thread_index(); i <= shares; i += PLAN_THREADS) {
        begin[i] = equal(i);
        if (i > 0 && i < shares) {
            int32_t column = find_last(starts, row_tiles, begin[i] * concurrent) / concurrent;
            int32_t item = starts[column * concurrent] / concurrent;
            int32_t tiles = starts[(column + 1) * concurrent] / concurrent - item;
            int32_t parts = max((tiles + share / 2) / share, 1);
            int32_t part = ((begin[i] - item) * parts * 2 + tiles) / (tiles * 2);
            begin[i] = item + (int32_t)((int64_t)tiles * part / parts);
        }
    }
    sync_group();
    const bool far = is_share_longer(begin, 1, shares, most, memory.warps);
    for (int32_t first = 0; first < shares; first += PLAN_THREADS) {
        int32_t i = first + thread_index(), at = 0;
        bool keep = false;
        if (i < shares) {
            at = far ? equal(i) : begin[i];
            keep = at < (far ? equal(i + 1) : begin[i + 1]);
        }
        int32_t to = running_sum<PLAN_THREADS>(keep, &kept, memory.warps);
        if (keep) { /* at or before i; later rounds read after this one's */
            begin[to] = at;
        }
    }
    sync_group();
    if (thread_index() == 0) {
        begin[kept] = total;
    }
    sync_group();
    return kept;
}

/* Shares of the stream, at most one for each group, in pieces of one item each. Concurrent row
 * tiles have the same keys and are cut alike: from here on their columns are counted, and segment i
 * * concurrent + lane belongs to row tile `lane`. The piece that begins share i is segment i;
 * column k that begins inside a share has segment shares + k. index, first and last count shares in
 * the same way. */
GPU_DEVICE int32_t cut_shares(const gpu_schedule &plan, int32_t row_tiles, int32_t all_tiles,
                              const int32_t *starts, plan_memory &memory)
{
    int32_t concurrent = plan.concurrent, columns = row_tiles / concurrent,
            total = all_tiles / concurrent;
    const int32_t *begins = memory.segment_begin;
    int32_t shares = begin_shares(plan, row_tiles, total, starts, memory);
    auto start_of = [&](int32_t column) { return starts[column * concurrent] / concurrent; };
    for (int32_t i = thread_index(); i < shares + columns; i += PLAN_THREADS) {
        bool inside = i >= shares;
        int32_t begin = inside ? start_of(i - shares) : begins[i];
        int32_t share = inside ? find_last(begins, shares, begin) : i, end = begins[share + 1];
        if (inside && begin == begins[share]) {
            continue; /* the item begins with the share */
        }
        int32_t column =
            inside ? i - shares : find_last(starts, row_tiles, begin * concurrent) / concurrent;
        int32_t item = start_of(column), item_end = start_of(column + 1);
        int32_t first = find_last(begins, shares, item);
        int32_t last = find_last(begins, shares, item_end - 1);
        for (int32_t lane = 0; lane < concurrent; lane++) {
            gpu_segment &s = plan.segments[i * concurrent + lane];
            s.row_tile_index = column * concurrent + lane;
            s.row_tile = plan.row_tiles[s.row_tile_index];
            s.begin = s.row_tile.start + begin - item;
            s.end = s.row_tile.start + min(end, item_end) - item;
            s.index = share * concurrent + lane;
            s.first = first * concurrent + lane;
            s.last = last * concurrent + lane;
            s.next = item_end < end ? (shares + column + 1) * concurrent + lane : -1;
        }
    }
    return shares * concurrent;
}

/* Shares of the stream, and segments of shares: most of a share is assigned to a CTA, then half of
 * the rest and so on is drawn by free CTAs. With few tiles for each CTA, shares stay whole. */
struct stream_cut {
    int32_t shares, levels, segments;
};

GPU_INLINE int32_t tiles_of(const gpu_problem &p, const int32_t *starts, int32_t row_tile)
{
    return (starts[row_tile + 1] - starts[row_tile]) / p.num_kv_heads;
}

/* A cut inside a short item moves to its nearer end, if that is at most `slack` tiles away: parts
 * of short items cost more than small differences of shares. The previous segment may then be
 * empty. */
GPU_DEVICE int32_t move_cut(const gpu_problem &p, const gpu_schedule &plan, int32_t row_tiles,
                            const int32_t *starts, int32_t at, int32_t share, int32_t slack)
{
    if (at >= starts[row_tiles]) {
        return at;
    }
    int32_t row_tile = find_last(starts, row_tiles, at), tiles = tiles_of(p, starts, row_tile);
    int32_t before = (at - starts[row_tile]) % tiles;
    const int32_t most = p.listed > 0 ? LISTED_ITEM : SHORT_ITEM;
    if (tiles * plan.tile > most || tiles > share || min(before, tiles - before) > slack) {
        return at;
    }
    return before * 2 <= tiles ? at - before : at + tiles - before;
}

/* Cuts items into chunks of at most `most` tiles; returns their number, and where each row tile's
 * begin. */
GPU_DEVICE int32_t count_chunks(const gpu_problem &p, int32_t row_tiles, const int32_t *starts,
                                int32_t most, plan_memory &memory)
{
    int32_t chunks = 0;
    if (row_tiles > PLAN_CHUNKS) {
        return INT32_MAX;
    }
    for (int32_t first = 0; first < row_tiles; first += PLAN_THREADS) {
        int32_t row_tile = first + thread_index(), cuts = 0;
        if (row_tile < row_tiles) {
            cuts = (tiles_of(p, starts, row_tile) + most - 1) / most * p.num_kv_heads;
        }
        int32_t at = running_sum<PLAN_THREADS>(cuts, &chunks, memory.warps);
        if (row_tile < row_tiles) {
            memory.chunk_start[row_tile] = at;
        }
    }
    sync_group();
    return chunks;
}

GPU_DEVICE int32_t begin_of_chunk(const gpu_problem &p, int32_t row_tiles, const int32_t *starts,
                                  int32_t most, int32_t chunk, const plan_memory &memory)
{
    int32_t row_tile = find_last(memory.chunk_start, row_tiles, chunk),
            tiles = tiles_of(p, starts, row_tile);
    int32_t cuts = (tiles + most - 1) / most, i = chunk - memory.chunk_start[row_tile],
            head = i / cuts;
    return starts[row_tile] + head * tiles + (int32_t)((int64_t)tiles * (i - head * cuts) / cuts);
}

/* Where shares begin: chunks of at most `most` tiles or, if it is 0, equal shares whose cuts move
 * by up to `slack` tiles. */
GPU_DEVICE void begin_stream(const gpu_problem &p, const gpu_schedule &plan, int32_t row_tiles,
                             int32_t total, const int32_t *starts, int32_t most, int32_t slack,
                             const stream_cut &cut, plan_memory &memory)
{
    const int32_t share = total / min(plan.ctas, total);
    for (int32_t i = thread_index(); i <= cut.shares; i += PLAN_THREADS) {
        int32_t at = total;
        if (i < cut.shares) {
            at = most > 0 ? begin_of_chunk(p, row_tiles, starts, most, i, memory)
                          : move_cut(p, plan, row_tiles, starts,
                                     (int32_t)((int64_t)total * i / cut.shares), share, slack);
        }
        memory.segment_begin[i * cut.levels] = at;
    }
    sync_group();
}

/* Shares are chunks of items, at most one for each CTA, if they are hardly longer than equal
 * shares; else equal shares, whose cuts move to ends of short items if that leaves no share much
 * longer. */
GPU_DEVICE stream_cut cut_stream(const gpu_problem &p, const gpu_schedule &plan, int32_t row_tiles,
                                 int32_t total, const int32_t *starts, plan_memory &memory)
{
    stream_cut cut = {min(plan.ctas, total), 1, 0};
    int32_t *begin = memory.segment_begin;
    int32_t share = total / cut.shares, room = min(plan.max_segments, PLAN_SEGMENTS);
    int32_t items = row_tiles * p.num_kv_heads;
    int64_t parts = (int64_t)items * MOST_PARTS;
    int32_t most =
        max((int32_t)((int64_t)total * (CHUNK_SLACK + 1) / ((int64_t)cut.shares * CHUNK_SLACK)),
            (int32_t)((total + parts - 1) / parts));
    if (share < LEAST_SHARE) { /* the longest equal share has as many tiles */
        most = max(most, (total + cut.shares - 1) / cut.shares);
    }
    int32_t chunks = count_chunks(p, row_tiles, starts, most, memory);
    bool whole = chunks <= cut.shares;
    if (share >= LEAST_SHARE && items >= cut.shares / LEAST_ITEMS && !whole) {
        while ((share >> (REST_OF_SHARE + cut.levels - 1)) >= LEAST_REST &&
               cut.shares * (cut.levels + 1) <= room) {
            cut.levels++;
        }
    }
    cut.shares = whole ? chunks : cut.shares;
    cut.segments = cut.shares * cut.levels;
    int32_t slack = SHORT_ITEM; /* more than any short item has tiles */
    begin_stream(p, plan, row_tiles, total, starts, whole ? most : 0, slack, cut, memory);
    if (!whole &&
        is_share_longer(begin, cut.levels, cut.shares,
                        share + max(share / CHUNK_SLACK, MOST_SHARE_SLACK), memory.warps)) {
        slack = LEAST_REST;
        begin_stream(p, plan, row_tiles, total, starts, 0, slack, cut, memory);
    }
    for (int32_t s = thread_index(); s < cut.segments; s += PLAN_THREADS) {
        int32_t i = s / cut.levels, level = s - i * cut.levels;
        if (level > 0) {
            int32_t start = begin[i * cut.levels], end = begin[(i + 1) * cut.levels];
            int32_t at = end - ((end - start) >> (REST_OF_SHARE + level - 1));
            int32_t to = move_cut(p, plan, row_tiles, starts, at, share, slack);
            begin[s] = to >= start && to <= end ? to : at;
        }
    }
    sync_group();
    return cut;
}

/* Finds the row tile in which each segment begins, and the segments that share its outer items.
 * Segments are ordered by level, so that the last ones are small and spread over all items; empty
 * ones are left out. */
GPU_DEVICE int32_t link_segments(const gpu_problem &p, const gpu_schedule &plan, int32_t row_tiles,
                                 const stream_cut &cut, const int32_t *starts, const int32_t *begin,
                                 int32_t *warps)
{
    int32_t kept = 0;
    for (int32_t first = 0; first < cut.segments; first += PLAN_THREADS) {
        int32_t turn = first + thread_index();
        int32_t i = turn % cut.shares * cut.levels + turn / cut.shares;
        bool keep = turn < cut.segments && begin[i] < begin[i + 1];
        int32_t at = running_sum<PLAN_THREADS>(keep, &kept, warps);
        if (!keep) {
            continue;
        }
        gpu_segment &s = plan.segments[at];
        s.begin = begin[i];
        s.end = begin[i + 1];
        s.index = i;
        s.row_tile_index = find_last(starts, row_tiles, s.begin);
        s.row_tile = plan.row_tiles[s.row_tile_index];
        int32_t last_row_tile = find_last(starts, row_tiles, s.end - 1);
        int32_t first_start = starts[s.row_tile_index];
        int32_t of_first = tiles_of(p, starts, s.row_tile_index);
        int32_t of_last = tiles_of(p, starts, last_row_tile);
        int32_t item = first_start + (s.begin - first_start) / of_first * of_first;
        int32_t last_item =
            starts[last_row_tile] + (s.end - 1 - starts[last_row_tile]) / of_last * of_last;
        s.first = find_last(begin, cut.segments, item);
        s.last = find_last(begin, cut.segments, last_item + of_last - 1);
    }
    return kept;
}

/* The first row tile of each request; requests outside least_rows .. most_rows have none. Returns
 * the total. */
GPU_DEVICE int32_t count_row_tiles(const gpu_problem &p, const gpu_schedule &plan, int32_t *warps)
{
    int32_t row_tiles = 0, requests = count_requests(p);
    for (int32_t first = 0; first < requests; first += PLAN_THREADS) {
        int32_t r = first + thread_index(), tiles = 0;
        if (r < requests) {
            int32_t rows = p.listed > 0
                               ? (p.query_start[0] + r < p.query_start[p.num_reqs]) * p.group
                               : (p.query_start[r + 1] - p.query_start[r]) * p.group;
            bool ours = plan.most_rows == 0 || (rows >= plan.least_rows && rows <= plan.most_rows);
            tiles = ours ? (rows + plan.tile_rows - 1) / plan.tile_rows : 0;
        }
        int32_t start = running_sum<PLAN_THREADS>(tiles, &row_tiles, warps);
        if (r < requests) {
            plan.row_tile_start[r] = start;
        }
    }
    sync_group();
    return row_tiles;
}

GPU_DEVICE void make_schedule(const gpu_problem &p, const gpu_schedule &plan, plan_memory &memory)
{
    int32_t segments = 0, row_tiles = count_row_tiles(p, plan, memory.warps);
    int32_t *starts = row_tiles <= PLAN_ROW_TILES ? memory.key_tile_start : plan.key_tile_start;
    int32_t total = plan_row_tiles(p, plan, &row_tiles, starts, memory.warps);
    if (plan.by_item == 2) {
        segments = total > 0 ? cut_shares(plan, row_tiles, total, starts, memory) : 0;
    } else if (plan.by_item) {
        segments = cut_items(p, plan, row_tiles, total, memory.warps);
    } else if (total > 0) {
        stream_cut cut = cut_stream(p, plan, row_tiles, total, starts, memory);
        segments =
            link_segments(p, plan, row_tiles, cut, starts, memory.segment_begin, memory.warps);
    }
    for (int32_t i = thread_index(); i < row_tiles * p.num_kv_heads; i += PLAN_THREADS) {
        plan.arrived[i] = 0;
    }
    if (thread_index() == 0) {
        *plan.header = {total, row_tiles, segments, 0};
    }
}

#endif
