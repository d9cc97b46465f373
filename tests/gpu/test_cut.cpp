/* SPDX-License-Identifier: Apache-2.0 */
/* The plan kernel's cuts on the CPU, a fibre for each of its threads: over random batches every
 * tile is in one segment, and the segments that an item's parts are counted by are those that have
 * parts of it; with lists, every token's row tile has its keys and its row of the block table. */
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#define PLAN_THREADS 64
#include "gpu/kernels/cut.h"

struct batch {
    std::vector<int> lengths, queries;
    int heads, ctas, tile, window, by_item;
    int listed = 0, spare = 0; /* keys of a list; tokens of num_tokens past the batch's */
};

static std::mt19937 generator(1);
static int failures;

static int below(int n)
{
    return (int)(generator() % (unsigned)n);
}

/* What a walk of the segments finds, as the attend kernel walks them. */
struct walk {
    std::vector<int> times;                              /* each tile is taken */
    std::vector<std::vector<std::pair<int, int>>> parts; /* for each item: (segment, slot) */
    std::vector<std::pair<int, int>> counted;            /* for each item: first and last segment */
    const char *wrong = nullptr;
};

static void walk_segment(const gpu_plan_params &p, const gpu_segment &s, walk &w)
{
    int row_tile = s.row_tile_index, at = s.begin;
    while (at < s.end) {
        const gpu_row_tile &v = p.schedule.row_tiles[row_tile];
        int within = at - v.start;
        if (within >= v.num_tiles * p.problem.num_kv_heads) {
            row_tile++;
            continue;
        }
        int head = within / v.num_tiles, tile = within - head * v.num_tiles;
        int count = min(v.num_tiles - tile, s.end - at),
            item = row_tile * p.problem.num_kv_heads + head;
        for (int i = 0; i < count; i++) {
            w.times[at + i]++;
        }
        if (count < v.num_tiles) {
            int first = tile > 0 ? s.first : s.index;
            int last = tile + count < v.num_tiles ? s.last : s.index;
            std::pair<int, int> range = {first, last};
            if (!w.parts[item].empty() && w.counted[item] != range) {
                w.wrong = "two segments count an item's parts differently";
            }
            w.counted[item] = range;
            w.parts[item].push_back(
                {s.index, p.schedule.by_item == 1 ? s.index : 2 * s.index + (tile == 0)});
        }
        at += count;
    }
}

/* The merge reads the parts of segments first .. last, the first one where an item begins. */
static void check_parts(const gpu_plan_params &p, walk &w)
{
    std::vector<char> used(2 * (size_t)p.schedule.max_segments);
    for (size_t item = 0; item < w.parts.size(); item++) {
        auto &parts = w.parts[item];
        std::sort(parts.begin(), parts.end());
        auto [first, last] = w.counted[item];
        int step = p.schedule.by_item == 2 ? p.schedule.concurrent : 1;
        if (!parts.empty() && (int)parts.size() != (last - first) / step + 1) {
            w.wrong = "an item has not as many parts as are counted";
        }
        for (size_t i = 0; i < parts.size(); i++) {
            int segment = first + (int)i * step;
            int slot = p.schedule.by_item == 1 ? segment : 2 * segment + (i == 0);
            if (parts[i] != std::pair<int, int>(segment, slot) || used[slot]) {
                w.wrong = "a part is not where the merge reads it";
            }
            used[parts[i].second] = 1;
        }
    }
}

static const char *walk_all(const gpu_plan_params &p, int parts, int longest)
{
    walk w;
    const gpu_header &header = *p.schedule.header;
    if (header.segments > p.schedule.max_segments) {
        return "more segments than there is room for";
    }
    w.times.resize(header.tiles);
    w.parts.resize((size_t)header.row_tiles * p.problem.num_kv_heads);
    w.counted.resize(w.parts.size());
    for (int share = 0, i = 0; share < header.segments;) {
        const gpu_segment &s = p.schedule.segments[i];
        i = p.schedule.by_item == 2 && s.next >= 0 ? s.next : ++share;
        if (s.begin >= s.end || s.begin < p.schedule.row_tiles[s.row_tile_index].start ||
            s.end > header.tiles ||
            memcmp(&s.row_tile, &p.schedule.row_tiles[s.row_tile_index], sizeof s.row_tile) != 0) {
            return "a segment is empty, or does not begin in its row tile";
        }
        if (longest >= 0 && s.end - s.begin > longest) {
            return "a segment is too long";
        }
        walk_segment(p, s, w);
    }
    for (int times : w.times) {
        if (times != 1) {
            return "a tile is not in one segment";
        }
    }
    check_parts(p, w);
    size_t found = 0;
    for (const auto &of_item : w.parts) {
        found += of_item.size();
    }
    return parts >= 0 && found != (size_t)parts ? "items are cut into more parts than they must"
                                                : w.wrong;
}

/* With lists each token is a request of the schedule, with its own request's row of the block table
 * and the keys up to its own. Tokens past the batch's have no row tile. */
static const char *check_tokens(const gpu_plan_params &p)
{
    const gpu_problem &a = p.problem;
    if (p.schedule.header->row_tiles != a.query_start[a.num_reqs]) {
        return "not each token has a row tile";
    }
    for (int token = 0, r = 0; token < p.schedule.header->row_tiles; token++) {
        const gpu_row_tile &v = p.schedule.row_tiles[token];
        r += token == a.query_start[r + 1];
        const int seen = a.seq_lens[r] - a.query_start[r + 1] + token + 1;
        if (v.request != token || v.query_start != token || v.query_len != 1) {
            return "a row tile is of another token";
        }
        if (v.seen != seen || v.k0 != 0 || v.k1 != min(seen, a.listed)) {
            return "a token sees other keys";
        }
        if (v.table != a.block_table_row[r] * a.block_table_stride) {
            return "a token has another request's row of the block table";
        }
    }
    return nullptr;
}

/* parts: of all items that are cut, as they have to be; longest: tiles of a segment; -1: any
 * number. */
static void run(const batch &b, const char *name, int parts = -1, int longest = -1)
{
    int reqs = (int)b.lengths.size();
    std::vector<int> starts(reqs + 1);
    for (int r = 0; r < reqs; r++) {
        starts[r + 1] = starts[r] + b.queries[r];
    }
    gpu_plan_params p = {};
    p.problem.num_reqs = reqs, p.problem.num_kv_heads = b.heads, p.problem.group = 4,
    p.problem.num_q_heads = 4 * b.heads;
    p.problem.causal = p.problem.paged = 1, p.problem.block_size = 64,
    p.problem.block_table_stride = 1000;
    p.problem.window_left = b.window > 0 ? b.window - 1 : -1, p.problem.window_right = -1;
    p.problem.query_start = starts.data(), p.problem.seq_lens = b.lengths.data();
    p.schedule.tile_rows = 16, p.schedule.by_item = b.by_item, p.schedule.ctas = b.ctas,
    p.schedule.tile = b.tile, p.schedule.concurrent = 1, p.schedule.least_share = 1 + b.ctas % 4;
    if (b.by_item == 2 && b.ctas % 3 == 0) { /* three concurrent row tiles of a query */
        p.problem.group = p.problem.num_q_heads = 48, p.schedule.concurrent = 3;
    }
    std::vector<int> table_rows(reqs);
    for (int r = 0; r < reqs; r++) {
        table_rows[r] = reqs - 1 - r;
    }
    p.problem.listed = b.listed, p.problem.num_tokens = starts[reqs] + b.spare;
    p.problem.lists = b.listed > 0, p.problem.block_table_row = table_rows.data();
    const int requests = b.listed > 0 ? p.problem.num_tokens : reqs;
    size_t row_tiles = (size_t)starts[reqs] * p.problem.group / 16 + requests + 1;
    p.schedule.max_segments = b.by_item ? 5 * b.ctas + (int)row_tiles * b.heads : 8 * b.ctas;
    gpu_header header = {};
    std::vector<gpu_row_tile> row_tile_memory(row_tiles);
    std::vector<gpu_segment> segments(p.schedule.max_segments);
    std::vector<int> row_tile_start(requests + 1), key_tile_start(row_tiles + 1),
        arrived(row_tiles * b.heads, 1);
    p.schedule.header = &header, p.schedule.row_tiles = row_tile_memory.data(),
    p.schedule.segments = segments.data();
    p.schedule.row_tile_start = row_tile_start.data(),
    p.schedule.key_tile_start = key_tile_start.data();
    p.schedule.arrived = arrived.data();
    static plan_memory memory;
    host_run_group(
        PLAN_THREADS, 0, 1,
        [](void *argument) {
            const gpu_plan_params &q = *(const gpu_plan_params *)argument;
            make_schedule(q.problem, q.schedule, memory);
        },
        &p);
    const char *wrong = walk_all(p, parts, longest);
    wrong = wrong == nullptr && b.listed > 0 ? check_tokens(p) : wrong;
    if (wrong != nullptr) {
        failures++;
        printf("%s, %d requests, %d heads, %d CTAs: %s\n", name, reqs, b.heads, b.ctas, wrong);
    }
}

static batch random_batch(int i)
{
    batch b;
    int kind = below(4), many = below(2), reqs = 1 + below(40);
    for (int r = 0; r < reqs; r++) {
        int length = kind == 0   ? below(3000)
                     : kind == 1 ? 1 + below(40000)
                     : kind == 2 ? (below(8) == 0 ? 50000 : 200)
                                 : below(400);
        b.queries.push_back(many ? 1 + below(8) : 1);
        b.lengths.push_back(length + b.queries.back());
    }
    b.heads = 1 + below(8);
    b.ctas = below(2) ? 264 : below(2) ? 132 : 17;
    b.tile = below(2) ? 64 : 128;
    b.window = below(3) == 0 ? 1024 : 0;
    b.by_item = i % 4 == 3 ? 1 + i / 4 % 2 : 0;
    b.heads = b.by_item == 2 ? 1 : b.heads;
    return b;
}

int main()
{
    const int alike[][2] = {{1, 1024},  {1, 8192},  {1, 32768}, {2, 8192},   {8, 8192},
                            {8, 32768}, {16, 8192}, {64, 1024}, {256, 1024}, {64, 8192}};
    for (auto [reqs, length] : alike) {
        for (int ctas : {264, 132}) {
            run({std::vector<int>(reqs, length), std::vector<int>(reqs, 1), 8, ctas, 64, 0, 0},
                "requests alike");
        }
    }
    /* 44 shares of three row tiles: items whole, and in two */
    run({std::vector<int>(85, 4096), std::vector<int>(85, 1), 1, 132, 64, 0, 2}, "two of a share",
        0);
    run({std::vector<int>(21, 8192), std::vector<int>(21, 1), 1, 132, 64, 0, 2}, "halves", 126);
    /* 66 tiles a share, whatever the lengths: 24 of a short item are a third of them */
    batch mixed = {{}, std::vector<int>(32, 1), 8, 132, 64, 0, 0};
    for (int r = 0; r < 32; r++) {
        mixed.lengths.push_back(128 * (r + 1) + 32);
    }
    run(mixed, "lengths of 160 to 4128", -1, 66);
    /* 144 tiles: chunks of two, and no segment of two items */
    run({{1100}, {1}, 8, 132, 64, 0, 0}, "one request", 72, 2);
    for (int i = 0; i < 40; i++) {
        batch b = random_batch(i);
        run(b, "random requests");
        if (b.by_item != 2) {
            b.listed = 64 << below(8), b.spare = below(4);
            run(b, "random lists");
        }
    }
    printf("%d batches failed\n", failures);
    return failures != 0;
}
