/* SPDX-License-Identifier: Apache-2.0 */
/* The search for the last key of a list by digits of the keys: a histogram of each, of all keys of
 * a row or of few that the threads have. */
#ifndef GPU_KERNELS_TOP_K_SEARCH_H
#define GPU_KERNELS_TOP_K_SEARCH_H

#include "gpu/device/scan.h"
#include "gpu/kernels/top_k_row.h"

#define TOP_K_THREADS GPU_THREADS_index_top_k
#define TOP_K_WARPS (TOP_K_THREADS / GPU_LANES)
#define TOP_K_DIGIT 11
#define TOP_K_BINS (1 << TOP_K_DIGIT)
#define TOP_K_COPIES 4 /* histograms, for neighbouring lanes */
#define TOP_K_FEW (TOP_K_BINS * TOP_K_COPIES)
#define TOP_K_OWN (TOP_K_FEW / TOP_K_THREADS)
#define TOP_K_STEPS 2 /* steps whose loads wait together */
#define TOP_K_MANY 4  /* the same where a thread keeps little else */

static_assert(TOP_K_OWN % 4 == 0, "each thread reads 16 bytes of marks at a time");

struct top_k_memory {
    alignas(16) int32_t few[TOP_K_FEW]; /* the histogram; then few entries; then marks */
    int32_t warps[GPU_LANES], above[TOP_K_WARPS], equal[TOP_K_WARPS];
    int32_t bin, before, count, number;
};

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

GPU_INLINE void count_bin(uint32_t bin, top_k_memory &memory)
{
    atomic_add_shared(&memory.few[bin * TOP_K_COPIES + thread_index() % TOP_K_COPIES], 1);
}

/* Adds a key's next digit to the histogram. */
GPU_INLINE void count_key(const top_k_search &s, uint32_t key, top_k_memory &memory)
{
    if (has_prefix(s, key)) {
        const int32_t width = digit_width(s);
        count_bin(key >> (32 - s.bits - width) & (uint32_t)((1 << width) - 1), memory);
    }
}

GPU_INLINE int32_t sum_to_lane(int32_t x)
{
    for (int d = 1; d < GPU_LANES; d <<= 1) {
        int32_t other = lane_up(x, d);
        x += lane_index() >= d ? other : 0;
    }
    return x;
}

/* Goes on by the digit that is counted, and empties the histogram. */
GPU_INLINE void find_bin(top_k_search &s, top_k_memory &memory)
{
    const int32_t thread = (int32_t)thread_index(), lane = lane_index();
    static_assert(TOP_K_WARPS <= GPU_LANES, "a lane for each warp's sum");
    sync_group();                                   /* the histogram is complete */
    constexpr int own = TOP_K_BINS / TOP_K_THREADS; /* bins of a thread, from the highest down */
    int32_t sums[own], sum = 0;
#pragma unroll
    for (int i = 0; i < own; i++) {
        uint4 *copies = (uint4 *)&memory.few[(TOP_K_BINS - 1 - thread * own - i) * TOP_K_COPIES];
        const uint4 x = *copies;
        *copies = make_uint4(0, 0, 0, 0);
        sums[i] = (int32_t)(x.x + x.y + x.z + x.w);
        sum += sums[i];
    }
    int32_t before = sum_to_lane(sum);
    if (lane == GPU_LANES - 1) {
        memory.warps[warp_index()] = before;
    }
    sync_group(); /* the warps' sums are written */
    before += sum_of_warp(lane < warp_index() ? memory.warps[lane] : 0) - sum;
#pragma unroll
    for (int i = 0; i < own; i++) {
        if (before < s.need && before + sums[i] >= s.need) {
            memory.bin = TOP_K_BINS - 1 - thread * own - i;
            memory.before = before;
            memory.count = sums[i];
        }
        before += sums[i];
    }
    sync_group(); /* the bin is found; it is written again after two barriers */
    const int32_t width = digit_width(s);
    s.prefix = s.prefix << width | (uint32_t)memory.bin;
    s.need -= memory.before;
    s.count = memory.count;
    s.bits += width;
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

/* Keys of a thread, and their entries. */
struct top_k_few {
    uint32_t keys[TOP_K_OWN];
    int32_t entries[TOP_K_OWN], count;
};

/* Goes on by a digit of these keys. */
GPU_INLINE void search_few(const top_k_few &few, top_k_search &s, top_k_memory &memory)
{
#pragma unroll
    for (int i = 0; i < TOP_K_OWN; i++) {
        if (i < few.count) {
            count_key(s, few.keys[i], memory);
        }
    }
    find_bin(s, memory);
}

/* Takes `count` entries, which are kept in the memory or are all of the row. */
GPU_INLINE void take_few(const top_k_row &row, int32_t count, bool kept, top_k_memory &memory,
                         top_k_few &few)
{
    few.count = (count - (int32_t)thread_index() + TOP_K_THREADS - 1) / TOP_K_THREADS;
#pragma unroll
    for (int base = 0; base < TOP_K_OWN; base += TOP_K_MANY) { /* loads that wait together */
#pragma unroll
        for (int i = base; i < base + TOP_K_MANY; i++) {
            const int32_t at = (int32_t)thread_index() + i * TOP_K_THREADS;
            few.entries[i] = i >= few.count ? 0 : kept ? memory.few[at] : at;
            few.keys[i] = row.scores[few.entries[i]];
        }
#pragma unroll
        for (int i = base; i < base + TOP_K_MANY; i++) {
            memory.few[thread_index() + i * TOP_K_THREADS] = 0;
            few.keys[i] = key_of_entry(row, few.keys[i], few.entries[i]);
        }
    }
    sync_group(); /* the memory is empty */
}

/* The place of the lowest bit that is set. */
GPU_INLINE int32_t lowest_bit(uint32_t x)
{
    return (int32_t)(float_bits((float)(x & (0u - x))) >> 23) - 127;
}

/* The least and the largest key of all threads. */
GPU_INLINE void join_range(uint32_t &low, uint32_t &high, top_k_memory &memory)
{
    for (int pass = 0; pass < 2; pass++) {
        for (int32_t d = GPU_LANES / 2; d > 0; d >>= 1) {
            const uint32_t least = lane_xor(low, d), most = lane_xor(high, d);
            low = least < low ? least : low;
            high = most > high ? most : high;
        }
        if (pass == 0) {
            const int32_t lane = lane_index(), from = lane < TOP_K_WARPS ? lane : 0;
            if (lane == 0) {
                memory.above[warp_index()] = (int32_t)low;
                memory.equal[warp_index()] = (int32_t)high;
            }
            sync_group(); /* all warps' keys are written */
            low = (uint32_t)memory.above[from];
            high = (uint32_t)memory.equal[from];
        }
    }
    sync_group(); /* the memory is used again */
}

/* The place of the highest bit that is set in x, or the next one. */
GPU_INLINE int32_t highest_bit(uint32_t x)
{
    return min((int32_t)(float_bits((float)x) >> 23) - 127, 31);
}

/* Where all keys with the prefix are in the list, the least that they could be is the last. */
GPU_INLINE void end_search(top_k_search &s)
{
    s.prefix = s.bits > 0 ? s.prefix << (32 - s.bits) : 0;
    s.bits = 32;
}

/* Counts keys from `least` on, which none is below, and begins with their highest bit. */
GPU_INLINE void narrow_search(uint32_t least, top_k_few &few, top_k_search &s, top_k_memory &memory)
{
    uint32_t low = 0, high = 0;
#pragma unroll
    for (int i = 0; i < TOP_K_OWN; i++) {
        if (i < few.count) {
            few.keys[i] -= least;
            high = few.keys[i] > high ? few.keys[i] : high;
        }
    }
    join_range(low, high, memory);
    s.bits = high == 0 ? 32 : 31 - highest_bit(high);
    for (int32_t i = (int32_t)thread_index(); i < TOP_K_WARPS; i += TOP_K_THREADS) {
        memory.above[i] = memory.equal[i] = 0;
    }
    sync_group(); /* the counts are clear */
}

#endif
