/* SPDX-License-Identifier: Apache-2.0 */
/* A row of scores that index_top_k chooses from, and its keys: numbers in the order of the scores.
 */
#ifndef GPU_KERNELS_TOP_K_ROW_H
#define GPU_KERNELS_TOP_K_ROW_H

#include "gpu/device/target.h"

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

#endif
