/* SPDX-License-Identifier: Apache-2.0 */
/* index_top_k: a group for each list. In long rows a sample gives a score that a few thousand
 * entries reach, of which one read of the scores keeps the entries; the list's last entry is found
 * among these by digits of the scores' bits, ordered as numbers. In short rows, and where these are
 * too many or not enough, digits of all scores lead to few: a histogram of each. 1 read of the
 * scores, or 3; the L2 limits it, and a list's steps that wait for one another. */
#include "gpu/device/scan.h"
#include "gpu/kernels/index_list.h"
#include "gpu/kernels/top_k_row.h"

#define TOP_K_THREADS GPU_THREADS_index_top_k
#define TOP_K_WARPS (TOP_K_THREADS / GPU_LANES)
#define TOP_K_DIGIT 11
#define TOP_K_BINS (1 << TOP_K_DIGIT)
#define TOP_K_COPIES 4 /* histograms, for neighbouring lanes */
#define TOP_K_FEW (TOP_K_BINS * TOP_K_COPIES)
#define TOP_K_OWN (TOP_K_FEW / TOP_K_THREADS)
#define TOP_K_SAMPLE (TOP_K_FEW / 2)
#define TOP_K_LEAST_RANK 32           /* in the sample: below, its score says little */
#define TOP_K_MARKED (TOP_K_FEW * 16) /* entries for which that memory has two bits each */
#define TOP_K_STEP (4 * GPU_LANES)    /* entries of a warp's step */
#define TOP_K_STEPS 2                 /* steps whose loads wait together */
#define TOP_K_MANY 4                  /* the same where a thread keeps little else */

static_assert(TOP_K_OWN % 4 == 0, "each thread reads 16 bytes of marks at a time");

struct top_k_memory {
    alignas(16) int32_t few[TOP_K_FEW]; /* the histogram; then few entries; then marks */
    int32_t warps[GPU_LANES], above[TOP_K_WARPS], equal[TOP_K_WARPS];
    int32_t bin, before, number;
};

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

GPU_INLINE int32_t digit_width(const top_k_search &s)
{
    return min(TOP_K_DIGIT, 32 - s.bits);
}

/* The memory is empty where a search begins, and after each digit. */
GPU_INLINE void clear_memory(top_k_memory &memory)
{
    for (int32_t i = (int32_t)thread_index(); i < TOP_K_FEW; i += TOP_K_THREADS) {
        memory.few[i] = 0;
    }
    sync_group(); /* the memory is empty */
}

/* Adds a key's next digit to the histogram. */
GPU_INLINE void count_key(const top_k_search &s, uint32_t key, top_k_memory &memory)
{
    if (has_prefix(s, key)) {
        const int32_t width = digit_width(s);
        const uint32_t bin = key >> (32 - s.bits - width) & (uint32_t)((1 << width) - 1);
        atomic_add_shared(&memory.few[bin * TOP_K_COPIES + thread_index() % TOP_K_COPIES], 1);
    }
}

/* Goes on by the digit that is counted, and empties the histogram. */
GPU_INLINE void find_bin(top_k_search &s, top_k_memory &memory)
{
    const int32_t thread = (int32_t)thread_index();
    sync_group();                                   /* the histogram is complete */
    constexpr int own = TOP_K_BINS / TOP_K_THREADS; /* bins of a thread, from the highest down */
    int32_t sums[own], sum = 0, carry = 0;
#pragma unroll
    for (int i = 0; i < own; i++) {
        uint4 *copies = (uint4 *)&memory.few[(TOP_K_BINS - 1 - thread * own - i) * TOP_K_COPIES];
        const uint4 x = *copies;
        *copies = make_uint4(0, 0, 0, 0);
        sums[i] = (int32_t)(x.x + x.y + x.z + x.w);
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
    const int32_t width = digit_width(s);
    s.prefix = s.prefix << width | (uint32_t)memory.bin;
    s.need -= memory.before;
    s.count = memory.number;
    s.bits += width;
    sync_group(); /* the memory is used again */
}

/* Goes on by a digit of all keys. */
GPU_INLINE void search_row(const top_k_row &row, top_k_search &s, top_k_memory &memory)
{
    for (int32_t base = 0; base < row.n; base += TOP_K_STEPS * TOP_K_THREADS * 4) {
        const int32_t first = base + (int32_t)thread_index() * 4;
        const top_k_scores<TOP_K_STEPS> scores =
            load_scores<TOP_K_STEPS>(row, first, TOP_K_THREADS * 4, row.n);
#pragma unroll
        for (int step = 0; step < TOP_K_STEPS; step++) {
            uint32_t keys[4];
            const int32_t count =
                keys_of(row, scores.x[step], first + step * TOP_K_THREADS * 4, row.n, keys);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (i < count) {
                    count_key(s, keys[i], memory);
                }
            }
        }
    }
    find_bin(s, memory);
}

/* A thread's keys of `count` ones, and their entries. */
struct top_k_few {
    uint32_t keys[TOP_K_OWN];
    int32_t entries[TOP_K_OWN], count;
};

GPU_INLINE bool is_one_of(const top_k_few &few, int i)
{
    return (int32_t)thread_index() + i * TOP_K_THREADS < few.count;
}

/* Goes on by a digit of these keys. */
GPU_INLINE void search_few(const top_k_few &few, top_k_search &s, top_k_memory &memory)
{
#pragma unroll
    for (int i = 0; i < TOP_K_OWN; i++) {
        if (is_one_of(few, i)) {
            count_key(s, few.keys[i], memory);
        }
    }
    find_bin(s, memory);
}

/* Takes `count` entries, which are kept in the memory or are all of the row. */
GPU_INLINE void take_few(const top_k_row &row, int32_t count, bool kept, top_k_memory &memory,
                         top_k_few &few)
{
    few.count = count;
#pragma unroll
    for (int i = 0; i < TOP_K_OWN; i++) {
        if (is_one_of(few, i)) {
            few.entries[i] = (int32_t)thread_index() + i * TOP_K_THREADS;
            if (kept) {
                int32_t *place = &memory.few[few.entries[i]];
                few.entries[i] = *place;
                *place = 0;
            }
            few.keys[i] = key_of_entry(row, row.scores[few.entries[i]], few.entries[i]);
        }
    }
    sync_group(); /* the memory is empty */
}

GPU_INLINE int32_t sum_to_lane(int32_t x)
{
    for (int d = 1; d < GPU_LANES; d <<= 1) {
        int32_t other = lane_up(x, d);
        x += lane_index() >= d ? other : 0;
    }
    return x;
}

/* The place of the lowest bit that is set. */
GPU_INLINE int32_t lowest_bit(uint32_t x)
{
    return (int32_t)(float_bits((float)(x & (0u - x))) >> 23) - 127;
}

/* A key that is the sample's best but rank - 1. */
GPU_INLINE uint32_t guess_key(const top_k_row &row, int32_t rank, top_k_memory &memory)
{
    const uint32_t step = (uint32_t)(row.n / TOP_K_SAMPLE);
    top_k_few sample;
    sample.count = TOP_K_SAMPLE;
#pragma unroll
    for (int i = 0; i < TOP_K_OWN; i++) {
        if (is_one_of(sample, i)) {
            const uint32_t which = thread_index() + (uint32_t)i * TOP_K_THREADS;
            const uint32_t entry = which * step + (which * 2654435761u >> 16) % step;
            sample.keys[i] = key_of_entry(row, row.scores[entry], (int32_t)entry);
        }
    }
    top_k_search s = {0, 0, rank, TOP_K_SAMPLE};
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

/* Keeps the entries that reach a sample's score. False: they are too many, or the list needs more.
 */
GPU_INLINE bool keep_best(const top_k_row &row, int32_t room, top_k_memory &memory)
{
    constexpr int32_t step = TOP_K_THREADS * 4, whole = TOP_K_MANY * step;
    const int32_t target = max(2 * room, TOP_K_FEW / 4);
    const int32_t rank = (int32_t)((int64_t)target * TOP_K_SAMPLE / row.n);
    if (row.pooled || row.n < 4 * TOP_K_SAMPLE || target > TOP_K_FEW / 4 * 3 ||
        rank < TOP_K_LEAST_RANK) {
        return false;
    }
    const float least = score_of_key(guess_key(row, rank, memory));
    if (thread_index() == 0) {
        memory.number = 0;
    }
    sync_group(); /* the number is written */
    for (int32_t base = 0; base < row.n; base += whole) {
        const int32_t own = base + (int32_t)thread_index() * 4;
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
    const int32_t number = memory.number;
    const bool right = number >= room && number <= TOP_K_FEW;
    if (!right) {
        clear_memory(memory);
    }
    return right;
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
        if (is_one_of(few, i) && few.keys[i] >= s.prefix) {
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
        if (is_one_of(few, i) && few.keys[i] >= s.prefix) {
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

GPU_INLINE void choose_entries(const top_k_row &row, int32_t room, top_k_memory &memory,
                               int32_t *out)
{
    top_k_search s = {0, 0, room, row.n};
    clear_memory(memory);
    const bool all = row.n <= TOP_K_FEW, best = !all && keep_best(row, room, memory);
    if (best) {
        s.count = memory.number;
        for (int32_t i = (int32_t)thread_index(); i < TOP_K_WARPS; i += TOP_K_THREADS) {
            memory.above[i] = memory.equal[i] = 0;
        }
    } else if (!all) {
        while (s.bits < 32 && s.count > TOP_K_FEW) {
            search_row(row, s, memory);
        }
        collect_few(row, s, memory);
    }
    const bool whole = (all || best) && row.n <= TOP_K_MARKED;
    if (s.bits < 32) {
        top_k_few few;
        take_few(row, s.count, !all, memory, few);
        while (s.bits < 32) {
            search_few(few, s, memory);
        }
        if (whole) {
            write_few(few, s, memory, out);
        } else {
            count_few(row, few, s, memory);
        }
    }
    if (!whole) {
        write_chosen(row, s, memory, out);
    }
    sync_group(); /* the memory is used again */
}

GPU_KERNEL(index_top_k, gpu_index_params)
{
    GPU_SHARED top_k_memory memory;
    const int32_t lists = count_lists(p);
    let_later_kernels_begin();
    for (int32_t i = (int32_t)group_index(); i < lists; i += (int32_t)group_count()) {
        const index_list list = find_list(p, i);
        top_k_row row = row_of_list(p, list, i);
        const int32_t room = room_of_list(p, list, row);
        if (row.n > room && room > 0) {
            if (p.rows_per_entry > 1) {
                pool_rows(p, row, list.rows);
            }
            choose_entries(row, room, memory, entries_of_list(p, list));
        }
        finish_list(p, list, row.n, room, TOP_K_THREADS);
    }
}
