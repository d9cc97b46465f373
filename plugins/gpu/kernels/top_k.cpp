/* SPDX-License-Identifier: Apache-2.0 */
/* index_top_k: a group for each list, or several that share a long one. In long rows a sample gives
 * a score that a few thousand entries reach, of which one read of the scores keeps the entries; the
 * list's last entry is found among these by digits of the scores' bits, ordered as numbers. Groups
 * that share a list keep entries of it each, among which the last of them to arrive searches. In
 * short rows, and where these are too many or not enough, digits of all scores lead to few: a
 * histogram of each. 1 read of the scores, or 3; the L2 limits it, and a list's steps that wait for
 * one another. */
#include "gpu/kernels/top_k_search.h"

#define TOP_K_SAMPLE (TOP_K_THREADS * 4) /* 4 neighbours for each thread */
#define TOP_K_LEAST_RANK 32              /* in the sample: smaller ranks say little about the row */
#define TOP_K_MARKED (TOP_K_FEW * 16)    /* entries for which that memory has two bits each */
#define TOP_K_STEP (4 * GPU_LANES)       /* entries of a warp's step */
static_assert(INDEX_PART_ROWS >= TOP_K_MANY * TOP_K_THREADS * 4, "a part has a step");
static_assert(INDEX_PARTS <= TOP_K_WARPS, "a warp or more for each part");

/* The best key of each entry's rows, in place of the first rows. A warp has TOP_K_STEPS entries at
 * a time. */
GPU_INLINE void pool_rows(const gpu_index_params &p, top_k_row &row, int32_t rows)
{
    const int32_t per_entry = p.rows_per_entry / p.rows_per_score;
    const int32_t scores = (rows + p.rows_per_score - 1) / p.rows_per_score;
    for (int32_t base = 0; base < row.n; base += TOP_K_WARPS * TOP_K_STEPS) {
        const int32_t own = base + warp_index() * TOP_K_STEPS;
        uint32_t best[TOP_K_STEPS] = {};
        for (int32_t i = lane_index(); i < per_entry; i += GPU_LANES) {
#pragma unroll
            for (int j = 0; j < TOP_K_STEPS; j++) {
                const int32_t at = (own + j) * per_entry + i;
                const uint32_t key = at < scores ? key_of_score(row.scores[at]) : 0;
                best[j] = key > best[j] ? key : best[j];
            }
        }
#pragma unroll
        for (int j = 0; j < TOP_K_STEPS; j++) {
            for (int32_t d = GPU_LANES / 2; d > 0; d >>= 1) {
                const uint32_t other = lane_xor(best[j], d);
                best[j] = other > best[j] ? other : best[j];
            }
        }
        sync_group(); /* the rows are read */
#pragma unroll
        for (int j = 0; j < TOP_K_STEPS; j++) {
            if (lane_index() == 0 && own + j < row.n) {
                row.scores[own + j] = best[j];
            }
        }
    }
    release_stores();
    sync_group(); /* all keys are written */
    acquire_loads();
    row.pooled = true;
}

/* A key that about `rank` entries of the sample reach. Scores between the least and the largest are
 * counted in equal steps; if too many are alike, by two digits. */
GPU_INLINE uint32_t guess_key(const top_k_row &row, int32_t rank, top_k_memory &memory)
{
    const uint32_t thread = thread_index(), step = (uint32_t)(row.n / TOP_K_SAMPLE) * 4;
    const uint4 x =
        *(const uint4 *)&row.scores[thread * step + (thread * 2654435761u >> 16) % (step / 4) * 4];
    clear_memory(memory); /* while the sample is loaded */
    top_k_few sample = {
        {key_of_score(x.x), key_of_score(x.y), key_of_score(x.z), key_of_score(x.w)}, {}, 4};
    uint32_t low = ~0u, high = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        low = sample.keys[i] < low ? sample.keys[i] : low;
        high = sample.keys[i] > high ? sample.keys[i] : high;
    }
    join_range(low, high, memory);
    const float from = score_of_key(low), range = score_of_key(high) - from;
    top_k_search s = {0, 0, rank, TOP_K_SAMPLE};
    if (range > 1e-30f && range < 1e38f) { /* a NaN's is not; `steps` is finite */
        const float steps = (float)(TOP_K_BINS - 1) / range;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float at = (score_of_key(sample.keys[i]) - from) * steps;
            count_bin((uint32_t)min((int32_t)at, TOP_K_BINS - 1), memory);
        }
        find_bin(s, memory);
        if (s.count <= rank / 2) {
            return key_of_score(float_bits(from + (float)s.prefix / steps));
        }
        s = {0, 0, rank, TOP_K_SAMPLE};
    }
    search_few(sample, s, memory);
    search_few(sample, s, memory);
    return s.prefix << (32 - s.bits);
}

/* Which of 4 entries reach a score, a bit for each. A NaN does. */
GPU_INLINE uint32_t reach(const uint4 &x, float least)
{
    return (bits_float(x.x) < least ? 0 : 1) | (bits_float(x.y) < least ? 0 : 2) |
           (bits_float(x.z) < least ? 0 : 4) | (bits_float(x.w) < least ? 0 : 8);
}

/* The same at the ends of a row: forced entries do, those past its end do not. */
GPU_INLINE uint32_t reach_at_end(const top_k_row &row, uint32_t bits, int32_t first)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        bits |= is_forced(row, first + i) ? 1u << i : 0;
    }
    const int32_t count = row.n - first;
    return count >= 4 ? bits : count > 0 ? bits & ((1u << count) - 1) : 0;
}

/* Part `own` of `count` parts of a list: step `own` of each `count` steps of a warp. */
struct top_k_part {
    int32_t count, own, list;
};

/* The rank in the sample of a score that about 2 * room entries of the row reach; 0: a sample does
 * not tell enough of it. */
GPU_INLINE int32_t rank_in_sample(const top_k_row &row, int32_t room)
{
    const int32_t target = max(2 * room, TOP_K_FEW / 2);
    const int32_t rank = (int32_t)((int64_t)target * TOP_K_SAMPLE / max(row.n, 1));
    return row.pooled || row.n < 4 * TOP_K_SAMPLE || target > TOP_K_FEW / 4 * 3 ||
                   rank < TOP_K_LEAST_RANK
               ? 0
               : rank;
}

/* Keeps the part's entries whose keys reach a sample's key, and counts them: memory.number may be
 * more than there is memory for. Returns the key. */
GPU_INLINE uint32_t keep_best(const top_k_row &row, const top_k_part &part, int32_t rank,
                              top_k_memory &memory)
{
    const uint32_t key = guess_key(row, rank, memory);
    const float least = score_of_key(key);
    const int32_t step = TOP_K_THREADS * 4 * part.count, whole = TOP_K_MANY * step;
    const int32_t first = (warp_index() * part.count + part.own) * TOP_K_STEP + lane_index() * 4;
    if (thread_index() == 0) {
        memory.number = 0;
    }
    sync_group(); /* the number is written */
    for (int32_t base = 0; base < row.n; base += whole) {
        const int32_t own = base + first;
        const top_k_scores<TOP_K_MANY> scores = load_scores<TOP_K_MANY>(row, own, step, row.n);
        const bool is_end = base < row.first_entries || base + whole > row.n - row.last_entries;
        uint32_t bits = 0;
        int32_t count = 0;
#pragma unroll
        for (int s = 0; s < TOP_K_MANY; s++) {
            uint32_t four = reach(scores.x[s], least);
            four = is_end ? reach_at_end(row, four, own + s * step) : four;
            bits |= four << (4 * s);
        }
        for (uint32_t left = bits; left != 0; left &= left - 1) {
            count++;
        }
        const int32_t to = sum_to_lane(count);
        int32_t at = 0;
        if (lane_index() == GPU_LANES - 1) {
            at = atomic_add_shared(&memory.number, to);
        }
        at = lane_read(at, GPU_LANES - 1) + to - count;
        for (; bits != 0 && at < TOP_K_FEW; bits &= bits - 1) {
            const int32_t i = lowest_bit(bits);
            memory.few[at++] = own + (i >> 2) * step + (i & 3);
        }
    }
    sync_group(); /* the entries are kept */
    return key;
}

/* Hands the entries that the group has kept to the last group of the list, whose threads then have
 * those of all groups. Before: the group's threads have min(s.count, INDEX_KEPT) entries. Returns
 * false in groups that are not the last. In the last one s.count becomes the number of all groups'
 * entries, or 0 if a group has kept more than the last one's threads can take. */
GPU_INLINE bool join_parts(const gpu_index_params &p, const top_k_part &part, top_k_memory &memory,
                           top_k_search &s, top_k_few &few)
{
    const int32_t thread = (int32_t)thread_index(), lane = lane_index();
    int32_t *counts = p.kept_count + part.list * part.count;
    int32_t *kept = p.kept + (int64_t)part.list * part.count * 2 * INDEX_KEPT;
#pragma unroll
    for (int i = 0; i < INDEX_KEPT / TOP_K_THREADS; i++) {
        if (i < few.count) {
            int32_t *at = kept + part.own * 2 * INDEX_KEPT + thread + i * TOP_K_THREADS;
            at[0] = (int32_t)few.keys[i];
            at[INDEX_KEPT] = few.entries[i];
        }
    }
    release_stores(); /* each warp's own */
    sync_group();     /* the entries are written, and thread 0 publishes them */
    if (thread == 0) {
        counts[part.own] = s.count;
        memory.before = add_and_publish(&p.arrived[part.list], 1);
    }
    sync_group(); /* the last group knows it */
    if (memory.before != part.count - 1) {
        return false;
    }
    const int32_t of_part = TOP_K_WARPS / part.count * GPU_LANES; /* threads */
    const int32_t from = thread / of_part, most = min(of_part * TOP_K_OWN, INDEX_KEPT);
    acquire_loads(); /* each warp's own */
    const int32_t other = lane < part.count ? counts[lane] : 0;
    const int32_t own = from < part.count ? lane_read(other, min(from, GPU_LANES - 1)) : 0;
    s.count = any_lane(other > most) ? 0 : sum_of_warp(other);
    const int32_t first = from * 2 * INDEX_KEPT + thread % of_part;
    few.count = s.count > 0 ? (own - thread % of_part + of_part - 1) / of_part : 0;
#pragma unroll
    for (int i = 0; i < TOP_K_OWN; i++) {
        const uint32_t at = i < few.count ? (uint32_t)(first + i * of_part) : 0;
        few.keys[i] = (uint32_t)kept[at];
        few.entries[i] = kept[at + INDEX_KEPT];
    }
    return true;
}

/* Entries of a warp: warp w has those from w times this on. */
GPU_INLINE int32_t entries_of_warp(const top_k_row &row)
{
    const int32_t steps = (row.n + TOP_K_STEP - 1) / TOP_K_STEP;
    return (steps + TOP_K_WARPS - 1) / TOP_K_WARPS * TOP_K_STEP;
}

/* Counts each warp's entries above the prefix, and keeps those that have it; if all their bits are
 * known, counts them. */
GPU_INLINE void collect_few(const top_k_row &row, const top_k_search &s, top_k_memory &memory)
{
    const int32_t begin = warp_index() * entries_of_warp(row);
    const int32_t end = min(begin + entries_of_warp(row), row.n);
    int32_t above = 0, equal = 0;
    if (thread_index() == 0) {
        memory.number = 0;
    }
    sync_group(); /* the number is written */
    for (int32_t base = begin; base < end; base += TOP_K_STEPS * TOP_K_STEP) {
        const int32_t own = base + lane_index() * 4;
        const top_k_scores<TOP_K_STEPS> scores =
            load_scores<TOP_K_STEPS>(row, own, TOP_K_STEP, end);
#pragma unroll
        for (int step = 0; step < TOP_K_STEPS; step++) {
            uint32_t keys[4];
            const int32_t first = own + step * TOP_K_STEP;
            const int32_t count = keys_of(row, scores.x[step], first, end, keys);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool has = i < count && has_prefix(s, keys[i]);
                above += i < count && !has && keys[i] >> (32 - s.bits) > s.prefix;
                equal += has;
                if (has && s.bits < 32) {
                    memory.few[atomic_add_shared(&memory.number, 1)] = first + i;
                }
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

/* Adds the few that are above the last key, and those equal to it, to the warps' counts. */
GPU_INLINE void count_few(const top_k_row &row, const top_k_few &few, const top_k_search &s,
                          top_k_memory &memory)
{
    const int32_t per = entries_of_warp(row);
#pragma unroll
    for (int i = 0; i < TOP_K_OWN; i++) {
        if (i < few.count && few.keys[i] >= s.prefix) {
            const int32_t warp = few.entries[i] / per;
            atomic_add_shared(&(few.keys[i] > s.prefix ? memory.above : memory.equal)[warp], 1);
        }
    }
    sync_group(); /* the warps' counts are complete */
}

/* Writes the few above the last key, and the first `need` of those equal to it, in order: each is
 * marked by a bit, in one word of two. */
GPU_INLINE void write_few(const top_k_few &few, const top_k_search &s, top_k_memory &memory,
                          int32_t *out)
{
    const int32_t thread = (int32_t)thread_index();
#pragma unroll
    for (int i = 0; i < TOP_K_OWN; i++) {
        if (i < few.count && few.keys[i] >= s.prefix) {
            const int32_t word = few.entries[i] / 32 * 2 + (few.keys[i] == s.prefix);
            atomic_add_shared(&memory.few[word], (int32_t)(1u << (few.entries[i] % 32)));
        }
    }
    sync_group(); /* all are marked */
    uint32_t above[TOP_K_OWN / 2], equal[TOP_K_OWN / 2];
    int32_t own = 0, carry = 0; /* above, and equal x 65536 */
#pragma unroll
    for (int i = 0; i < TOP_K_OWN / 4; i++) {
        const uint4 x = *(const uint4 *)&memory.few[thread * TOP_K_OWN + i * 4];
        above[i * 2] = x.x;
        equal[i * 2] = x.y;
        above[i * 2 + 1] = x.z;
        equal[i * 2 + 1] = x.w;
    }
#pragma unroll
    for (int i = 0; i < TOP_K_OWN / 2; i++) {
        for (uint32_t left = above[i]; left != 0; left &= left - 1) {
            own++;
        }
        for (uint32_t left = equal[i]; left != 0; left &= left - 1) {
            own += 1 << 16;
        }
    }
    const int32_t before = running_sum<TOP_K_THREADS>(own, &carry, memory.warps);
    int32_t a = before & 0xffff, e = before >> 16;
#pragma unroll
    for (int i = 0; i < TOP_K_OWN / 2; i++) {
        for (uint32_t left = above[i] | equal[i]; left != 0; left &= left - 1) {
            const int32_t bit = lowest_bit(left);
            const bool is_above = (above[i] >> bit & 1) != 0;
            if (is_above || e < s.need) {
                out[a + min(e, s.need)] = (thread * (TOP_K_OWN / 2) + i) * 32 + bit;
            }
            a += is_above;
            e += !is_above;
        }
    }
}

/* Writes a step's entries. above, equal: entries before it. */
GPU_INLINE void write_step(const top_k_search &s, const uint32_t (&keys)[4], int32_t count,
                           int32_t first, int32_t &above, int32_t &equal, int32_t *out)
{
    int32_t own = 0; /* above, and equal x 65536 */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        own += i < count && keys[i] > s.prefix ? 1 : 0;
        own += i < count && keys[i] == s.prefix ? 1 << 16 : 0;
    }
    if (!any_lane(own != 0)) {
        return;
    }
    const int32_t sum = sum_to_lane(own), all = lane_read(sum, GPU_LANES - 1);
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
    above += all & 0xffff;
    equal += all >> 16;
}

/* Writes the entries above the last key, and the first `need` of those equal to it, in order. */
GPU_INLINE void write_chosen(const top_k_row &row, const top_k_search &s,
                             const top_k_memory &memory, int32_t *out)
{
    const int32_t begin = warp_index() * entries_of_warp(row);
    const int32_t end = min(begin + entries_of_warp(row), row.n);
    int32_t above = 0, equal = 0; /* before the step */
    for (int32_t w = 0; w < warp_index(); w++) {
        above += memory.above[w];
        equal += memory.equal[w];
    }
    for (int32_t base = begin; base < end; base += TOP_K_STEPS * TOP_K_STEP) {
        const int32_t own = base + lane_index() * 4;
        const top_k_scores<TOP_K_STEPS> scores =
            load_scores<TOP_K_STEPS>(row, own, TOP_K_STEP, end);
#pragma unroll
        for (int step = 0; step < TOP_K_STEPS; step++) {
            uint32_t keys[4];
            const int32_t first = own + step * TOP_K_STEP;
            const int32_t count = keys_of(row, scores.x[step], first, end, keys);
            write_step(s, keys, count, first, above, equal, out);
        }
    }
}

/* Writes `room` entries of a row that has more. False: another group of the list does. */
GPU_INLINE bool choose_entries(const gpu_index_params &p, const top_k_row &row, int32_t room,
                               const top_k_part &part, top_k_memory &memory, int32_t *out)
{
    top_k_search s = {0, 0, room, row.n};
    top_k_few few;
    uint32_t least = 0; /* none of the entries that are kept has a smaller key */
    const bool all = row.n <= TOP_K_FEW;
    const int32_t rank = all ? 0 : rank_in_sample(row, room);
    bool best = rank > 0;
    if (best) {
        least = keep_best(row, part, rank, memory);
        s.count = memory.number;
        take_few(row, min(s.count, part.count > 1 ? INDEX_KEPT : TOP_K_FEW), true, memory, few);
        if (part.count > 1 && !join_parts(p, part, memory, s, few)) {
            return false;
        }
        best = s.count >= room && s.count <= TOP_K_FEW;
    } else if (part.own > 0) {
        return false;
    }
    if (best) {
        narrow_search(least, few, s, memory);
    } else {
        least = 0;
        s.count = row.n;
        clear_memory(memory);
        if (!all) {
            while (s.bits < 32 && s.count > TOP_K_FEW) {
                search_row(row, s, memory);
            }
            collect_few(row, s, memory);
        }
        if (s.bits < 32) {
            take_few(row, s.count, !all, memory, few);
        }
    }
    const bool whole = (all || best) && row.n <= TOP_K_MARKED;
    const bool has_few = best || s.bits < 32;
    while (s.bits < 32 && s.count > s.need) {
        search_few(few, s, memory);
    }
    end_search(s);
    if (whole) {
        write_few(few, s, memory, out);
    } else {
        if (has_few) {
            count_few(row, few, s, memory);
        }
        s.prefix += least;
        write_chosen(row, s, memory, out);
    }
    sync_group(); /* the memory is used again */
    return true;
}

GPU_KERNEL(index_top_k, gpu_index_params)
{
    GPU_SHARED top_k_memory memory;
    const int32_t groups = count_lists(p) * p.parts;
    let_later_kernels_begin();
    for (int32_t i = (int32_t)group_index(); i < groups; i += (int32_t)group_count()) {
        const int32_t number = i / p.parts;
        const top_k_part part = {p.parts, i - number * p.parts, number};
        const index_list list = find_list(p, number, true);
        top_k_row row = row_of_list(p, list, number);
        const int32_t room = room_of_list(p, list, row);
        bool mine = part.own == 0;
        if (row.n > room && room > 0) {
            if (p.rows_per_entry > 1) {
                pool_rows(p, row, list.rows);
            }
            mine = choose_entries(p, row, room, part, memory, entries_of_list(p, list));
        }
        if (mine) {
            finish_list(p, list, row.n, room, TOP_K_THREADS);
        }
    }
}
