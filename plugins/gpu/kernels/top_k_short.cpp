/* SPDX-License-Identifier: Apache-2.0 */
/* index_top_k_short: a group for each list of up to INDEX_SHORT entries, of which each thread keeps
 * a few keys. Bit by bit the last key of the list is found: its steps, up to 32, are short, as is
 * the code. */
#include "gpu/device/scan.h"
#include "gpu/kernels/top_k_row.h"

#define SHORT_THREADS GPU_THREADS_index_top_k_short
#define SHORT_WARPS (SHORT_THREADS / GPU_LANES)
#define SHORT_STEP (4 * SHORT_THREADS)         /* entries of the group's step */
#define SHORT_STEPS (INDEX_SHORT / SHORT_STEP) /* a thread has 4 entries in each */
#define SHORT_OWN (INDEX_SHORT / SHORT_THREADS)
static_assert(INDEX_SHORT % SHORT_STEP == 0, "whole steps");

struct short_memory {
    alignas(16) uint32_t keys[INDEX_SHORT];
    int32_t counts[2][SHORT_WARPS], warps[GPU_LANES];
};

/* The best key of each entry's rows, 0 after the last entry. WIDTH scores of an entry are loaded at
 * a time. */
template <int WIDTH>
GPU_INLINE void load_short(const gpu_index_params &p, const top_k_row &row, int32_t rows,
                           short_memory &memory)
{
    const int32_t per_entry = p.rows_per_entry / p.rows_per_score;
    const int32_t scores = (rows + p.rows_per_score - 1) / p.rows_per_score;
    const int32_t thread = (int32_t)thread_index();
    uint32_t best[SHORT_OWN] = {};
    for (int32_t i = 0; i < per_entry; i += WIDTH) {
        uint32_t x[SHORT_OWN][4];
#pragma unroll
        for (int j = 0; j < SHORT_OWN; j++) {
            const int32_t at = (thread + j * SHORT_THREADS) * per_entry + i;
            if (WIDTH == 4) { /* rows are whole 16 bytes */
                const uint4 four =
                    at < scores ? *(const uint4 *)&row.scores[at] : make_uint4(0, 0, 0, 0);
                x[j][0] = four.x, x[j][1] = four.y, x[j][2] = four.z, x[j][3] = four.w;
            } else {
                x[j][0] = at < scores ? row.scores[at] : 0;
            }
        }
#pragma unroll
        for (int j = 0; j < SHORT_OWN; j++) {
            const int32_t at = (thread + j * SHORT_THREADS) * per_entry + i;
#pragma unroll
            for (int w = 0; w < WIDTH; w++) {
                const uint32_t key = at + w < scores ? key_of_score(x[j][w]) : 0;
                best[j] = key > best[j] ? key : best[j];
            }
        }
    }
#pragma unroll
    for (int j = 0; j < SHORT_OWN; j++) {
        const int32_t entry = thread + j * SHORT_THREADS;
        memory.keys[entry] = entry < row.n && is_forced(row, entry) ? FORCED_KEY : best[j];
    }
    sync_group(); /* all keys are written */
}

/* How many of the threads' keys are at least `least`, which is not 0. The next call needs other
 * `counts`, since a warp may still read these. */
GPU_INLINE int32_t count_keys(const uint32_t (&keys)[SHORT_OWN], uint32_t least, int32_t *counts)
{
    int32_t count = 0;
#pragma unroll
    for (int i = 0; i < SHORT_OWN; i++) {
        count += keys[i] >= least;
    }
    count = sum_of_warp(count);
    if (lane_index() == 0) {
        counts[warp_index()] = count;
    }
    sync_group(); /* all warps' counts are written */
    int32_t sum = 0;
#pragma unroll
    for (int w = 0; w < SHORT_WARPS; w++) {
        sum += counts[w];
    }
    return sum;
}

/* Writes `room` of a row's entries, which are more: those above the greatest key that so many
 * reach, and the first of those equal to it. */
GPU_INLINE void choose_short(int32_t n, int32_t room, short_memory &memory, int32_t *out)
{
    uint32_t keys[SHORT_OWN], last = 0;
#pragma unroll
    for (int s = 0; s < SHORT_STEPS; s++) {
        const uint4 x = *(const uint4 *)&memory.keys[s * SHORT_STEP + thread_index() * 4];
        keys[4 * s] = x.x, keys[4 * s + 1] = x.y, keys[4 * s + 2] = x.z, keys[4 * s + 3] = x.w;
    }
    int32_t reached = n, buffer = 0;
    for (uint32_t bit = 0x80000000u; bit != 0 && reached > room; bit >>= 1) {
        const int32_t count = count_keys(keys, last | bit, memory.counts[buffer]);
        if (count >= room) {
            last |= bit;
            reached = count;
        }
        buffer ^= 1;
    }
    int32_t need = 0; /* entries with the last key */
    if (reached == room) {
        last--; /* all that reach it are chosen */
    } else {
        need = room - (last < FORCED_KEY ? count_keys(keys, last + 1, memory.counts[buffer]) : 0);
    }
    int32_t before = 0; /* above, and equal x 65536 */
    for (int s = 0; s < SHORT_STEPS && s * SHORT_STEP < n; s++) {
        int32_t own = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            own += keys[4 * s + i] > last ? 1 : 0;
            own += keys[4 * s + i] == last ? 1 << 16 : 0;
        }
        int32_t sum = running_sum<SHORT_THREADS>(own, &before, memory.warps);
        int32_t above = sum & 0xffff, equal = sum >> 16;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool is_above = keys[4 * s + i] > last, is_equal = keys[4 * s + i] == last;
            if (is_above || (is_equal && equal < need)) {
                out[above + min(equal, need)] = s * SHORT_STEP + (int32_t)thread_index() * 4 + i;
            }
            above += is_above;
            equal += is_equal;
        }
    }
}

GPU_KERNEL(index_top_k_short, gpu_index_params)
{
    GPU_SHARED short_memory memory;
    const int32_t lists = count_lists(p);
    let_later_kernels_begin();
    for (int32_t i = (int32_t)group_index(); i < lists; i += (int32_t)group_count()) {
        const index_list list = find_list(p, i, true);
        const top_k_row row = row_of_list(p, list, i);
        const int32_t room = room_of_list(p, list, row);
        if (row.n > room && room > 0) {
            if (p.rows_per_entry / p.rows_per_score % 4 == 0) {
                load_short<4>(p, row, list.rows, memory);
            } else {
                load_short<1>(p, row, list.rows, memory);
            }
            choose_short(row.n, room, memory, entries_of_list(p, list));
            sync_group(); /* the memory is used again */
        }
        finish_list(p, list, row.n, room, SHORT_THREADS);
    }
}
