/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters of an indexer's kernels (attn/indexer.h), shared by host and device. */
#ifndef GPU_INDEX_H
#define GPU_INDEX_H

#include "gpu/params.h"

#define INDEX_ROWS 64 /* rows of the cache of an item of index_scores */
#define INDEX_POOL 16 /* rows whose best score alone a faster index_scores may store */
/* index_top_k_short chooses from up to so many entries, of up to so many scores each. */
#define INDEX_SHORT 2048
#define INDEX_SHORT_SCORES 16
/* A list of many scores may be the work of several groups of index_top_k, each of which keeps up to
 * INDEX_KEPT entries and their keys. */
#define INDEX_KEPT 4096
#define INDEX_PARTS 16        /* groups of a list, at most */
#define INDEX_GROUPS 128      /* groups of all such lists, at most */
#define INDEX_PART_ROWS 16384 /* scores of a group, at least */

/* Tokens first_token .. first_token + num_tokens - 1 of the batch. Their lists are counted along:
 * list i is of token i / groups and of heads (i % groups) * heads / groups and following. */
struct gpu_index_params {
    struct gpu_tensor q, weights; /* weights: [T, heads], data NULL: 1 */
    struct gpu_cache k;           /* block, slot: of the cache's rows, not of tokens */
    const int32_t *query_start, *seq_lens, *block_table, *block_table_row;
    int64_t block_table_stride;
    const float *q_scale; /* NULL: q_scale_host */
    float scale, q_scale_host;
    int32_t num_reqs, heads, groups, relu;
    int32_t tokens_per_row, block_rows; /* rows of a block */
    int32_t first_token, num_tokens, max_rows;
    int32_t topk, rows_per_entry, first_entries, last_entries, tail, forced_on_top;
    int32_t rows_per_score; /* 1, or INDEX_POOL, which divides rows_per_entry */
    float *scores;          /* [lists of these tokens][score_stride] */
    int64_t score_stride;
    int32_t *out, *lengths;       /* lengths: [T, groups] or NULL */
    int64_t out_token, out_group; /* elements */
    int32_t room;                 /* places of a list */
    int32_t parts;                /* groups of a list */
    /* with several: the groups that are done, of each list, which index_scores clears; the keys and
     * entries that each group has kept, and their number */
    int32_t *arrived, *kept, *kept_count;
};

/* Writes keys after norm, rotation and Hadamard transform. */
struct gpu_index_write_params {
    struct gpu_tensor from, cos_sin;
    struct gpu_cache to;
    const int64_t *slots, *positions;
    int64_t num_slots;
    const void *weight, *bias; /* a norm's; NULL: none */
    int32_t weight_dtype, bias_dtype, layer_norm;
    int32_t rotary_dim, rotary_first, neox, hadamard; /* rotary_dim 0: no rotation */
    int32_t tokens_per_row, block_size;
    float norm_eps;
};

#ifndef __OPENCL_CPP_VERSION__ /* OpenCL C++ has no pointers to functions */
/* Faster index_scores, with any rows_per_score. The bits of a score depend only on its query, its
 * row and the layer. */
struct gpu_index_scores {
    /* `load` and `run` return NULL or the cause of a failure. With several parts `run` also sets
     * p->arrived[0 .. INDEX_GROUPS - 1] to 0 (clear_arrived), which index_top_k counts in. */
    const char *(*load)(const struct gpu_device *device);
    bool (*takes)(const struct gpu_index_params *p);
    const char *(*run)(const struct gpu_device *device, const struct gpu_index_params *p,
                       void *stream);
};
#endif

#endif
