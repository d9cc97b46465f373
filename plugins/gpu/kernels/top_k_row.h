/* SPDX-License-Identifier: Apache-2.0 */
/* A row of scores that index_top_k chooses from, and its keys: numbers in the order of the scores.
 */
#ifndef GPU_KERNELS_TOP_K_ROW_H
#define GPU_KERNELS_TOP_K_ROW_H

#include "gpu/kernels/index_list.h"

#define FORCED_KEY 0xffffffffu
#define NAN_KEY 0xfffffffeu

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

GPU_INLINE float score_of_key(uint32_t key)
{
    return bits_float((key >> 31) != 0 ? key & 0x7fffffffu : ~key);
}

GPU_INLINE bool is_forced(const top_k_row &row, int32_t entry)
{
    return entry < row.first_entries || entry >= row.n - row.last_entries;
}

GPU_INLINE uint32_t key_of_entry(const top_k_row &row, uint32_t bits, int32_t entry)
{
    return is_forced(row, entry) ? FORCED_KEY : row.pooled ? bits : key_of_score(bits);
}

/* Scores of steps of 4 entries each. */
template <int STEPS> struct top_k_scores {
    uint4 x[STEPS];
};

template <int STEPS>
GPU_INLINE top_k_scores<STEPS> load_scores(const top_k_row &row, int32_t first, int32_t step,
                                           int32_t end)
{
    top_k_scores<STEPS> scores;
#pragma unroll
    for (int s = 0; s < STEPS; s++) { /* rows are whole 16 bytes */
        scores.x[s] = make_uint4(0, 0, 0, 0);
        if (first + s * step < end) {
            scores.x[s] = *(const uint4 *)(row.scores + first + s * step);
        }
    }
    return scores;
}

/* The keys of 4 entries from `first` on, which 4 divides; how many there are before `end`. */
GPU_INLINE int32_t keys_of(const top_k_row &row, const uint4 &x, int32_t first, int32_t end,
                           uint32_t (&keys)[4])
{
    keys[0] = key_of_entry(row, x.x, first);
    keys[1] = key_of_entry(row, x.y, first + 1);
    keys[2] = key_of_entry(row, x.z, first + 2);
    keys[3] = key_of_entry(row, x.w, first + 3);
    return max(min(end - first, 4), 0);
}

GPU_INLINE int32_t sum_of_warp(int32_t x)
{
    for (int32_t d = GPU_LANES / 2; d > 0; d >>= 1) {
        x += lane_xor(x, d);
    }
    return x;
}

/* The row of a list's scores. */
GPU_INLINE top_k_row row_of_list(const gpu_index_params &p, const index_list &list, int32_t number)
{
    return {(uint32_t *)(p.scores + number * p.score_stride),
            (list.rows + p.rows_per_entry - 1) / p.rows_per_entry, p.first_entries, p.last_entries,
            false};
}

/* Entries that are chosen if the row has more. */
GPU_INLINE int32_t room_of_list(const gpu_index_params &p, const index_list &list,
                                const top_k_row &row)
{
    const int32_t forced = min(p.first_entries + p.last_entries, row.n);
    return p.topk + (p.forced_on_top ? forced : -(int32_t)list.tail);
}

GPU_INLINE int32_t *entries_of_list(const gpu_index_params &p, const index_list &list)
{
    return p.out + list.token * p.out_token + list.group * p.out_group;
}

/* Writes a list's rest by a group of `threads`: all entries of a row that has no more than `room`,
 * the unfinished row, -1 after them, and its length. */
GPU_INLINE void finish_list(const gpu_index_params &p, const index_list &list, int32_t n,
                            int32_t room, int32_t threads)
{
    int32_t *out = entries_of_list(p, list);
    const int32_t thread = (int32_t)thread_index();
    int32_t count = min(n, room);
    for (int32_t e = thread; e < n && n <= room; e += threads) {
        out[e] = e;
    }
    if (thread == 0 && list.tail) {
        out[count] = list.rows;
    }
    count += list.tail;
    for (int32_t e = count + thread; e < p.room; e += threads) {
        out[e] = -1;
    }
    if (thread == 0 && p.lengths != nullptr) {
        p.lengths[(int64_t)list.token * p.groups + list.group] = count;
    }
}

#endif
