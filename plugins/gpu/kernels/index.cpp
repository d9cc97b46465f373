/* SPDX-License-Identifier: Apache-2.0 */
/* Indexers (attn/draft/indexer.h). index_scores: a group has a tile of INDEX_ROWS rows of the cache
 * by up to INDEX_COLUMNS columns, each a head of one list; 2 * D FLOPs for a row and head on FMA
 * units, which is the limit. Scores are summed over a list's heads before they are stored. */
#include "gpu/index.h"

#include "gpu/device/rows.h"
#include "gpu/device/scan.h"
#include "gpu/device/search.h"

#define INDEX_COLUMNS 64
#define INDEX_DEPTH 16 /* dims of a step */
#define INDEX_THREADS GPU_THREADS_index_scores
#define INDEX_EDGE 4 /* rows, and columns, of a thread */

static_assert(INDEX_ROWS == INDEX_COLUMNS &&
                  INDEX_ROWS * INDEX_COLUMNS == INDEX_THREADS * INDEX_EDGE * INDEX_EDGE &&
                  INDEX_ROWS * INDEX_DEPTH == INDEX_THREADS * 4,
              "each thread computes 4 x 4 scores and loads 4 numbers of each operand");

/* A list, and the rows that its token sees. */
struct index_list {
    int32_t token, group, request, rows;
    bool tail; /* a row is begun and not finished */
};

GPU_INLINE index_list find_list(const gpu_index_params &p, int32_t list)
{
    index_list v;
    v.token = p.query_start[0] + p.first_token + list / p.groups;
    v.group = list % p.groups;
    v.request = find_last(p.query_start, p.num_reqs, v.token);
    int32_t seen = p.seq_lens[v.request] - p.query_start[v.request + 1] + v.token + 1;
    v.rows = min(seen / p.tokens_per_row, p.max_rows);
    v.tail = p.tail != 0 && seen % p.tokens_per_row != 0;
    return v;
}

/* Lists of these tokens that the batch has; graphs are replayed with fewer. */
GPU_INLINE int32_t count_lists(const gpu_index_params &p)
{
    int32_t tokens = p.query_start[p.num_reqs] - p.query_start[0] - p.first_token;
    return max(min(tokens, p.num_tokens), 0) * p.groups;
}

struct index_memory {
    float k[INDEX_DEPTH][INDEX_ROWS], q[INDEX_DEPTH][INDEX_COLUMNS];
    float scores[INDEX_ROWS][INDEX_COLUMNS + 1];
    float scale[INDEX_ROWS];
};

/* Lists first .. first + lists - 1 of one request, with `heads` columns each, and a tile of rows.
 */
struct index_span {
    int32_t first, lists, heads;
    int32_t row, rows; /* the tile's first; those that the last token sees */
    int32_t before;    /* columns before this round's */
    int64_t table;     /* offset of the request's row in the block table */
};

/* Adds the products of a round's tile to acc [row][column]. */
GPU_INLINE void multiply_tile(const gpu_index_params &p, const index_span &s, index_memory &memory,
                              float (&acc)[INDEX_EDGE][INDEX_EDGE])
{
    const int32_t thread = (int32_t)thread_index(), own = thread / 4, part = thread % 4 * 4;
    const int32_t row = s.row + own, column = s.before + own, list = s.first + column / s.heads;
    const bool has_row = row < s.rows, has_head = column < s.lists * s.heads;
    gpu_cache_row from = {nullptr, 0, nullptr};
    const char *query = nullptr;
    if (has_row) {
        int32_t index = row / p.block_rows;
        from = enter_row<false>(p.k, p.block_table[s.table + index], row - index * p.block_rows, 0);
    }
    if (has_head) {
        int32_t head = list % p.groups * s.heads + column % s.heads;
        query = p.q.data + (int64_t)(p.query_start[0] + p.first_token + list / p.groups) * p.q.row +
                (int64_t)head * p.q.head;
    }
    if (part == 0) {
        memory.scale[own] = has_row ? row_scale<false>(p.k, from) : 0.0f;
    }
    for (int32_t base = 0; base < p.k.head_size; base += INDEX_DEPTH) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int32_t d = base + part + i;
            bool has_dim = d < p.k.head_size;
            memory.k[part + i][own] =
                has_row && has_dim ? row_element<false>(p.k, from, 0, d) : 0.0f;
            memory.q[part + i][own] = has_head && has_dim ? number_load(query, p.q.dtype, d) : 0.0f;
        }
        sync_group(); /* the operands are written */
#pragma unroll
        for (int d = 0; d < INDEX_DEPTH; d++) {
            float k[INDEX_EDGE], q[INDEX_EDGE];
#pragma unroll
            for (int i = 0; i < INDEX_EDGE; i++) {
                k[i] = memory.k[d][thread % 16 * INDEX_EDGE + i];
                q[i] = memory.q[d][thread / 16 * INDEX_EDGE + i];
            }
#pragma unroll
            for (int i = 0; i < INDEX_EDGE; i++) {
#pragma unroll
                for (int j = 0; j < INDEX_EDGE; j++) {
                    acc[i][j] += k[i] * q[j];
                }
            }
        }
        sync_group(); /* the operands are read */
    }
}

/* Each head's score with its activation and weight. */
GPU_INLINE void apply_weights(const gpu_index_params &p, const index_span &s, index_memory &memory,
                              const float (&acc)[INDEX_EDGE][INDEX_EDGE])
{
    const int32_t thread = (int32_t)thread_index();
    const float factor = p.scale * (p.q_scale != nullptr ? *p.q_scale : p.q_scale_host);
#pragma unroll
    for (int j = 0; j < INDEX_EDGE; j++) {
        const int32_t at = thread / 16 * INDEX_EDGE + j, column = s.before + at;
        const int32_t list = s.first + column / s.heads;
        float weight = 1.0f;
        if (p.weights.data != nullptr && column < s.lists * s.heads) {
            const char *row =
                p.weights.data +
                (int64_t)(p.query_start[0] + p.first_token + list / p.groups) * p.weights.row +
                (int64_t)(list % p.groups * s.heads + column % s.heads) * p.weights.head;
            weight = number_load(row, p.weights.dtype, 0);
        }
#pragma unroll
        for (int i = 0; i < INDEX_EDGE; i++) {
            const int32_t row = thread % 16 * INDEX_EDGE + i;
            float x = acc[i][j] * memory.scale[row] * factor;
            x = p.relu && x < 0.0f ? 0.0f : x; /* a NaN stays */
            memory.scores[row][at] = x * weight;
        }
    }
}

GPU_INLINE void score_span(const gpu_index_params &p, index_span &s, index_memory &memory)
{
    const int32_t thread = (int32_t)thread_index(), row = thread % INDEX_ROWS;
    const int32_t columns = s.lists * s.heads;
    float sum = 0.0f; /* several rounds: of the only list */
    for (s.before = 0; s.before < columns; s.before += INDEX_COLUMNS) {
        float acc[INDEX_EDGE][INDEX_EDGE] = {};
        multiply_tile(p, s, memory, acc);
        apply_weights(p, s, memory, acc);
        sync_group(); /* the scores are written */
        const int32_t heads = min(s.heads, columns - s.before);
        for (int32_t i = thread / INDEX_ROWS; i < s.lists; i += INDEX_THREADS / INDEX_ROWS) {
            sum = s.before == 0 ? 0.0f : sum;
            for (int32_t h = 0; h < min(heads, INDEX_COLUMNS); h++) {
                sum += memory.scores[row][i * s.heads + h];
            }
            if (s.before + INDEX_COLUMNS >= columns &&
                s.row + row < find_list(p, s.first + i).rows) {
                p.scores[(s.first + i) * p.score_stride + s.row + row] = sum;
            }
        }
        sync_group(); /* the memory is used again */
    }
}

GPU_KERNEL(index_scores, gpu_index_params)
{
    GPU_SHARED index_memory memory;
    index_span s;
    s.heads = p.heads / p.groups;
    const int32_t lists = count_lists(p), tile = max(INDEX_COLUMNS / s.heads, 1);
    const int64_t row_tiles = (p.max_rows + INDEX_ROWS - 1) / INDEX_ROWS;
    const int64_t items = row_tiles * ((lists + tile - 1) / tile);
    let_later_kernels_begin();
    for (int64_t item = group_index(); item < items; item += group_count()) {
        s.row = (int32_t)(item % row_tiles) * INDEX_ROWS;
        s.first = (int32_t)(item / row_tiles) * tile;
        const int32_t end = min(s.first + tile, lists);
        for (; s.first < end; s.first += s.lists) { /* lists of one request at a time */
            const int32_t request = find_list(p, s.first).request;
            const int32_t next = p.query_start[request + 1] - p.query_start[0] - p.first_token;
            s.lists = min(next * p.groups, end) - s.first;
            s.rows = find_list(p, s.first + s.lists - 1).rows;
            s.table =
                (int64_t)(p.block_table_row != nullptr ? p.block_table_row[request] : request) *
                p.block_table_stride;
            if (s.row < s.rows) {
                score_span(p, s, memory);
            }
        }
    }
}

/* index_top_k: a group for each list. The list's last entry is found by digits of the scores' bits,
 * ordered as numbers: a histogram for each digit until few entries are left, which are then kept
 * in shared memory. 3 reads of the scores; bound by the L2. */
#define TOP_K_THREADS GPU_THREADS_index_top_k
#define TOP_K_WARPS (TOP_K_THREADS / GPU_LANES)
#define TOP_K_DIGIT 11
#define TOP_K_BINS (1 << TOP_K_DIGIT)
#define TOP_K_COPIES 4 /* histograms, for neighbouring lanes */
#define TOP_K_FEW (TOP_K_BINS * TOP_K_COPIES / 2)
#define TOP_K_STEP (4 * GPU_LANES) /* entries of a warp's step */
#define FORCED_KEY 0xffffffffu
#define NAN_KEY 0xfffffffeu

struct top_k_memory {
    int32_t few[2 * TOP_K_FEW]; /* the histogram; then the keys of few entries, and these */
    int32_t warps[GPU_LANES], counts[33];
    int32_t above[TOP_K_WARPS], equal[TOP_K_WARPS];
    int32_t bin, before, number;
};

/* What is chosen from: entries 0 .. n - 1; keys that are `pooled` are there instead of scores. */
struct top_k_row {
    uint32_t *scores;
    int32_t n, first_entries, last_entries;
    bool pooled;
};

/* Bits in the order of the numbers. -0 is 0, a NaN is above all. */
GPU_INLINE uint32_t key_of_score(uint32_t bits)
{
    const uint32_t size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) {
        return NAN_KEY;
    }
    return size == 0 ? 0x80000000u : (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

GPU_INLINE uint32_t key_of_entry(const top_k_row &row, uint32_t bits, int32_t entry)
{
    const bool forced = entry < row.first_entries || entry >= row.n - row.last_entries;
    return forced ? FORCED_KEY : row.pooled ? bits : key_of_score(bits);
}

/* The keys of 4 entries from `first` on, which 4 divides; how many there are. */
GPU_INLINE int32_t load_keys(const top_k_row &row, int32_t first, uint32_t (&keys)[4])
{
    const int32_t count = max(min(row.n - first, 4), 0);
    uint4 x = make_uint4(0, 0, 0, 0);
    if (count > 0) { /* rows are whole 16 bytes */
        x = *(const uint4 *)(row.scores + first);
    }
    keys[0] = key_of_entry(row, x.x, first);
    keys[1] = key_of_entry(row, x.y, first + 1);
    keys[2] = key_of_entry(row, x.z, first + 2);
    keys[3] = key_of_entry(row, x.w, first + 3);
    return count;
}

/* The best key of each entry's rows, in place of the first rows. */
GPU_INLINE void pool_rows(const gpu_index_params &p, top_k_row &row, int32_t rows)
{
    for (int32_t base = 0; base < row.n; base += TOP_K_WARPS) {
        const int32_t entry = base + warp_index(), first = entry * p.rows_per_entry;
        uint32_t best = 0;
        for (int32_t i = lane_index(); i < p.rows_per_entry && first + i < rows; i += GPU_LANES) {
            uint32_t key = key_of_score(row.scores[first + i]);
            best = key > best ? key : best;
        }
        for (int32_t d = GPU_LANES / 2; d > 0; d >>= 1) {
            uint32_t other = lane_xor(best, d);
            best = other > best ? other : best;
        }
        sync_group(); /* the rows are read */
        if (lane_index() == 0 && entry < row.n) {
            row.scores[entry] = best;
        }
    }
    release_stores();
    sync_group(); /* all keys are written */
    acquire_loads();
    row.pooled = true;
}

/* The search for the last key of a list: keys whose first `bits` bits are above `prefix` are in it,
 * and `need` of those with these bits. */
struct top_k_search {
    uint32_t prefix;
    int32_t bits, need, count; /* count: keys with these bits */
};

GPU_INLINE bool has_prefix(const top_k_search &s, uint32_t key)
{
    return s.bits == 0 || key >> (32 - s.bits) == s.prefix;
}

/* Goes on by a digit. */
GPU_INLINE void search_digit(const top_k_row &row, top_k_search &s, top_k_memory &memory)
{
    const int32_t thread = (int32_t)thread_index();
    const int32_t width = min(TOP_K_DIGIT, 32 - s.bits), shift = 32 - s.bits - width;
    for (int32_t i = thread; i < 2 * TOP_K_FEW; i += TOP_K_THREADS) {
        memory.few[i] = 0;
    }
    sync_group(); /* the histogram is empty */
    for (int32_t first = thread * 4; first < row.n; first += TOP_K_THREADS * 4) {
        uint32_t keys[4];
        const int32_t count = load_keys(row, first, keys);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i < count && has_prefix(s, keys[i])) {
                const uint32_t bin = keys[i] >> shift & (uint32_t)((1 << width) - 1);
                atomic_add_shared(&memory.few[bin * TOP_K_COPIES + thread % TOP_K_COPIES], 1);
            }
        }
    }
    sync_group();                                   /* the histogram is complete */
    constexpr int own = TOP_K_BINS / TOP_K_THREADS; /* bins of a thread, from the highest down */
    int32_t sums[own], sum = 0, carry = 0;
#pragma unroll
    for (int i = 0; i < own; i++) {
        const int32_t *bin = &memory.few[(TOP_K_BINS - 1 - thread * own - i) * TOP_K_COPIES];
        sums[i] = 0;
        for (int c = 0; c < TOP_K_COPIES; c++) {
            sums[i] += bin[c];
        }
        sum += sums[i];
    }
    int32_t before = running_sum<TOP_K_THREADS>(sum, &carry, memory.warps);
#pragma unroll
    for (int i = 0; i < own; i++) {
        if (before < s.need && before + sums[i] >= s.need) {
            memory.bin = TOP_K_BINS - 1 - thread * own - i;
            memory.before = before;
            memory.number = sums[i];
        }
        before += sums[i];
    }
    sync_group(); /* the bin is found */
    s.prefix = s.prefix << width | (uint32_t)memory.bin;
    s.need -= memory.before;
    s.count = memory.number;
    s.bits += width;
    sync_group(); /* the memory is used again */
}

/* Entries of a warp: warp w has those from w times this on. */
GPU_INLINE int32_t entries_of_warp(const top_k_row &row)
{
    const int32_t steps = (row.n + TOP_K_STEP - 1) / TOP_K_STEP;
    return (steps + TOP_K_WARPS - 1) / TOP_K_WARPS * TOP_K_STEP;
}

GPU_INLINE int32_t sum_of_warp(int32_t x)
{
    for (int32_t d = GPU_LANES / 2; d > 0; d >>= 1) {
        x += lane_xor(x, d);
    }
    return x;
}

/* Counts each warp's entries above the prefix, and keeps the keys that have it; if all their bits
 * are known, counts them. */
GPU_INLINE void collect_few(const top_k_row &row, const top_k_search &s, top_k_memory &memory)
{
    const int32_t begin = warp_index() * entries_of_warp(row);
    const int32_t end = min(begin + entries_of_warp(row), row.n);
    int32_t above = 0, equal = 0;
    for (int32_t first = begin + lane_index() * 4; first < end; first += TOP_K_STEP) {
        uint32_t keys[4];
        const int32_t count = load_keys(row, first, keys);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool has = i < count && has_prefix(s, keys[i]);
            above += i < count && !has && keys[i] >> (32 - s.bits) > s.prefix;
            equal += has;
            if (has && s.bits < 32) {
                const int32_t at = atomic_add_shared(&memory.number, 1);
                memory.few[at] = (int32_t)keys[i];
                memory.few[TOP_K_FEW + at] = first + i;
            }
        }
    }
    above = sum_of_warp(above);
    equal = sum_of_warp(equal);
    if (lane_index() == 0) {
        memory.above[warp_index()] = above;
        memory.equal[warp_index()] = s.bits == 32 ? equal : 0;
    }
    sync_group(); /* counts and few are complete */
}

/* Finds the remaining bits of the last key, one by one, and counts the few of each warp. */
GPU_INLINE void search_few(const top_k_row &row, top_k_search &s, top_k_memory &memory)
{
    const int32_t thread = (int32_t)thread_index(), per = entries_of_warp(row);
    uint32_t last = s.bits > 0 ? s.prefix << (32 - s.bits) : 0;
    int32_t better = 0; /* few keys that are above `last` with the bits so far */
    for (int32_t bit = 31 - s.bits; bit >= 0; bit--) {
        const uint32_t next = last | 1u << bit;
        int32_t count = 0;
        for (int32_t i = thread; i < s.count; i += TOP_K_THREADS) {
            count += (uint32_t)memory.few[i] >= next;
        }
        count = sum_of_warp(count);
        if (lane_index() == 0 && count > 0) {
            atomic_add_shared(&memory.counts[bit], count);
        }
        sync_group(); /* all have counted */
        count = memory.counts[bit];
        last = count >= s.need ? next : last;
        better = count >= s.need ? better : count;
    }
    for (int32_t i = thread; i < s.count; i += TOP_K_THREADS) {
        const uint32_t key = (uint32_t)memory.few[i];
        if (key >= last) {
            const int32_t warp = memory.few[TOP_K_FEW + i] / per;
            atomic_add_shared(&(key > last ? memory.above : memory.equal)[warp], 1);
        }
    }
    sync_group(); /* the warps' counts are complete */
    s.prefix = last;
    s.bits = 32;
    s.need -= better;
}

/* Writes the entries above the last key, and the first `need` of those equal to it, in order. */
GPU_INLINE void write_chosen(const top_k_row &row, const top_k_search &s,
                             const top_k_memory &memory, int32_t *out)
{
    const int32_t lane = lane_index(), begin = warp_index() * entries_of_warp(row);
    const int32_t end = min(begin + entries_of_warp(row), row.n);
    int32_t above = 0, equal = 0; /* before the step */
    for (int32_t w = 0; w < warp_index(); w++) {
        above += memory.above[w];
        equal += memory.equal[w];
    }
    for (int32_t base = begin; base < end; base += TOP_K_STEP) {
        uint32_t keys[4];
        const int32_t first = base + lane * 4, count = load_keys(row, first, keys);
        int32_t own = 0; /* above, and equal x 65536 */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            own += i < count && keys[i] > s.prefix ? 1 : 0;
            own += i < count && keys[i] == s.prefix ? 1 << 16 : 0;
        }
        if (!any_lane(own != 0)) {
            continue;
        }
        int32_t sum = own;
        for (int d = 1; d < GPU_LANES; d <<= 1) {
            int32_t other = lane_up(sum, d);
            sum += lane >= d ? other : 0;
        }
        int32_t a = above + ((sum - own) & 0xffff), e = equal + ((sum - own) >> 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool is_above = i < count && keys[i] > s.prefix;
            const bool is_equal = i < count && keys[i] == s.prefix;
            if (is_above || (is_equal && e < s.need)) {
                out[a + min(e, s.need)] = first + i;
            }
            a += is_above;
            e += is_equal;
        }
        sum = lane_read(sum, GPU_LANES - 1);
        above += sum & 0xffff;
        equal += sum >> 16;
    }
}

GPU_INLINE void choose_entries(const top_k_row &row, int32_t room, top_k_memory &memory,
                               int32_t *out)
{
    const int32_t thread = (int32_t)thread_index();
    top_k_search s = {0, 0, room, row.n};
    for (int32_t i = thread; i < 33; i += TOP_K_THREADS) {
        memory.counts[i] = 0;
    }
    while (s.bits < 32 && s.count > TOP_K_FEW) {
        search_digit(row, s, memory);
    }
    if (thread == 0) {
        memory.number = 0;
    }
    sync_group(); /* the number is written */
    collect_few(row, s, memory);
    if (s.bits < 32) {
        search_few(row, s, memory);
    }
    write_chosen(row, s, memory, out);
    sync_group(); /* the memory is used again */
}

GPU_KERNEL(index_top_k, gpu_index_params)
{
    GPU_SHARED top_k_memory memory;
    const int32_t lists = count_lists(p), thread = (int32_t)thread_index();
    let_later_kernels_begin();
    for (int32_t i = (int32_t)group_index(); i < lists; i += (int32_t)group_count()) {
        const index_list list = find_list(p, i);
        int32_t *out = p.out + list.token * p.out_token + list.group * p.out_group;
        top_k_row row = {(uint32_t *)(p.scores + i * p.score_stride),
                         (list.rows + p.rows_per_entry - 1) / p.rows_per_entry, p.first_entries,
                         p.last_entries, false};
        const int32_t forced = min(p.first_entries + p.last_entries, row.n);
        const int32_t room = p.topk + (p.forced_on_top ? forced : -(int32_t)list.tail);
        int32_t count = min(row.n, room);
        if (row.n <= room) {
            for (int32_t e = thread; e < row.n; e += TOP_K_THREADS) {
                out[e] = e;
            }
        } else if (room > 0) {
            if (p.rows_per_entry > 1) {
                pool_rows(p, row, list.rows);
            }
            choose_entries(row, room, memory, out);
        }
        if (thread == 0 && list.tail) {
            out[count] = list.rows;
        }
        count += list.tail;
        for (int32_t e = count + thread; e < p.room; e += TOP_K_THREADS) {
            out[e] = -1;
        }
        if (thread == 0 && p.lengths != nullptr) {
            p.lengths[(int64_t)list.token * p.groups + list.group] = count;
        }
    }
}
