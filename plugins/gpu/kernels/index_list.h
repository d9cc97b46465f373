/* SPDX-License-Identifier: Apache-2.0 */
/* An indexer's lists, as its kernels count them. */
#ifndef GPU_KERNELS_INDEX_LIST_H
#define GPU_KERNELS_INDEX_LIST_H

#include "gpu/device/search.h"
#include "gpu/index.h"

/* A list, and the rows that its token sees. */
struct index_list {
    int32_t token, group, request, rows;
    bool tail; /* a row is begun and not finished */
};

/* by_lanes: all lanes of a warp look for one list. */
GPU_INLINE index_list find_list(const gpu_index_params &p, int32_t list, bool by_lanes = false)
{
    index_list v;
    v.token = p.query_start[0] + p.first_token + list / p.groups;
    v.group = list % p.groups;
    v.request = by_lanes ? find_last_by_lanes(p.query_start, p.num_reqs, v.token)
                         : find_last(p.query_start, p.num_reqs, v.token);
    int32_t seen = p.seq_lens[v.request] - p.query_start[v.request + 1] + v.token + 1;
    seen = max(seen, 0); /* padding: queries of a request without keys */
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

/* Clears what the groups of index_top_k count; for index_scores, with groups of so many threads. */
template <int THREADS> GPU_INLINE void clear_arrived(const gpu_index_params &p)
{
    static_assert(INDEX_GROUPS <= THREADS, "a thread for each list");
    if (p.parts > 1 && group_index() == 0 && thread_index() < INDEX_GROUPS) {
        p.arrived[thread_index()] = 0;
    }
}

#endif
