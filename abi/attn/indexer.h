/* SPDX-License-Identifier: Apache-2.0 */
/* An indexer (ATTN_LAYER_INDEXER), a layer of its own kind that scores the rows of a cache of index
 * keys and gives, for each query token, the list of those that another layer is to attend to. Terms
 * and ties: docs/semantics.md, Indexers.
 *
 *     DeepSeek-V3.2, GLM-5 (DSA)   ReLU, weights, topk 2048
 *     MiniMax-M3 (MSA)             identity, num_groups = num_q_heads = its KV heads, topk 16,
 *                                  rows_per_entry 128, last_entries 1
 *     Qwen4-Exp (QSA)              ReLU, tokens_per_row 4, topk 512, tail, forced_on_top
 *     GLM-5.3-Flash                ReLU, weights, tokens_per_row 16, topk 128, tail, forced_on_top
 *     DeepSeek-V4                  ReLU, weights, tokens_per_row 4, topk 512
 *
 * Layer fields: num_q_heads H, num_kv_heads 1, head_size D; always causal. kv_dtype is f16, bf16,
 * f32, one of fp8's (k_scale is the scale of all), fp8_per_token_head (a float32 scale for each
 * row: 132 bytes at D 128) or mxfp4 (68 bytes). Its cache is one of role INDEX_K, in the layout of
 * MLA's latent rows. block_size, block tables, slots and lengths count tokens, as those of the
 * layer that attends, so that both may use one table; a block has block_size / tokens_per_row rows.
 *
 * What a kernel sees. Scores and lists are one call, of the slot `attend`, whose arguments are an
 * attend's: k_cache the index keys, v_cache NULL, out the lists. They are one call and not two, so
 * that scores [T, rows] never have to exist in a form that both sides agree on: a backend keeps
 * those of a chunk of queries in its own scratch (schedule_size), in its own format, or none.
 * write_kv: a row k [num_slots, 1, D]; the one at slot s is row s / tokens_per_row of the cache,
 * and is written where s is the last token of its row, else skipped. The engine pools over a row's
 * tokens; it also norms, rotates and transforms keys, unless the layer has attn_index_write
 * (draft/index_write.h) and write_kv does so. */
#ifndef ATTN_INDEXER_H
#define ATTN_INDEXER_H

#include "tensor.h"

enum attn_indexer_activation { ATTN_INDEXER_IDENTITY = 0, ATTN_INDEXER_RELU = 1 };

struct attn_indexer_desc { /* on attn_layer_desc */
    struct attn_ext ext;   /* id ATTN_EXT_INDEXER_DESC */
    int32_t topk;          /* entries of a list: those of the highest scores */
    /* G lists for each token, of num_q_heads / G heads each; 0 reads as 1, here and below, and
     * kernels get 1 */
    int32_t num_groups;
    int32_t activation;     /* enum attn_indexer_activation, of each head's score */
    int32_t has_weights;    /* 1: runs bring a weight for each head */
    int32_t tokens_per_row; /* that a row of the cache stands for */
    int32_t rows_per_entry; /* whose highest score is the entry's */
    /* entries that are listed whatever their score: the first and the last ones that the query
     * sees */
    int32_t first_entries;
    int32_t last_entries;
    /* 1, with tokens_per_row above 1 and rows_per_entry 1: so is the row that the query's token
     * has begun and not finished */
    int32_t tail;
    /* 0: forced entries take places of the topk; 1: they come on top, and a list has room for
     * topk + first_entries + last_entries + tail */
    int32_t forced_on_top;
};

/* The run's q is [T, H, D], of the activations' dtype or, as of other layers, q_dtype; k
 * [num_slots, 1, D]; v and lse are NULL. out, int32 [T, G, room]: entries in ascending order, each
 * once, then -1; an entry is a position in the request divided by tokens_per_row rows_per_entry.
 * The last stride is 1. Idle steps write -1. */
struct attn_io_indexer { /* on attn_step_io; needed with has_weights, else optional */
    struct attn_ext ext; /* id ATTN_EXT_IO_INDEXER */
    /* [T, H] of f16, bf16 or f32: factors of the head's score, whatever else the model multiplies
     * in (1 / sqrt(H), the scale of a quantized query) */
    const struct attn_tensor *weights;
    int32_t *lengths; /* device [T, G]: entries of each list; NULL: not asked for */
};

struct attn_indexer_caps { /* on attn_backend_caps; without it the kind is not served */
    struct attn_ext ext;   /* id ATTN_EXT_CAPS_INDEXER */
    uint32_t activations;  /* mask of 1 << enum attn_indexer_activation; 0: identity alone */
    int32_t head_size_max;
    int32_t topk_max;
    int32_t num_groups_max; /* 0 reads as 1, as in the next two */
    int32_t tokens_per_row_max;
    int32_t rows_per_entry_max;
    int32_t forced_max; /* first_entries + last_entries + tail at most */
    int32_t reserved;
};

#endif
