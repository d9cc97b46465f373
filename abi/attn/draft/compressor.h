/* SPDX-License-Identifier: Apache-2.0 */
/* A draft (abi/README.md, Drafts): a compressor, a layer of its own kind that pools each few tokens
 * into one row by gates (DeepSeek-V4: 4 tokens, overlapping, or 128). Its output are rows that a
 * layer with attn_compressed_rows, or an indexer, takes as its own. docs/semantics.md, section 9.
 *
 * Layer fields: num_q_heads = num_kv_heads = 2 (1 + overlaps), head_size D; always causal; kv_dtype
 * f32 or AUTO, which is f32. Its cache is the state, the engine's as every cache: for each token
 * what it brings, in float32, in the layout of latent rows (role EXTRA). It is a sliding window's,
 * of tokens_per_row (1 + overlaps) tokens: block tables, slots and lengths count tokens, and blocks
 * in front of the window are free again.
 *
 *     a ring for each request   a block table whose entries all name one block, which has room for
 *                               the window and a step's tokens
 *     rejected drafts           the next token of a position writes over its state; a row that a
 *                               rejected token finished is not seen until it is written again
 *     a cached prefix of L      needs the states of its last L mod tokens_per_row + overlaps
 *                               tokens_per_row tokens: none where it ends with a row and rows do
 *                               not overlap
 *
 * What a kernel sees: write_kv of k [num_slots, 2 (1 + overlaps), D] to k_cache, v_cache NULL; then
 * the slot `attend`, q NULL, out [T, 1, D]. */
#ifndef ATTN_DRAFT_COMPRESSOR_H
#define ATTN_DRAFT_COMPRESSOR_H

#include "../tensor.h"

#define ATTN_LAYER_DRAFT_COMPRESSOR 6 /* a further enum attn_layer_kind */

#define ATTN_EXT_DRAFT_COMPRESSOR_DESC 0x80fu /* struct attn_compressor_desc, of a layer */
#define ATTN_EXT_DRAFT_IO_COMPRESSOR 0x813u   /* struct attn_io_compressor, of a run */

struct attn_compressor_desc { /* on attn_layer_desc */
    struct attn_ext ext;      /* id ATTN_EXT_DRAFT_COMPRESSOR_DESC */
    int32_t tokens_per_row;   /* r */
    int32_t overlaps;         /* 1: a row pools the r tokens before its own, too */
    int32_t rope;             /* enum attn_rope of the pooled row, by its first token's position */
    int32_t rotary_dim;       /* even, its last dims; 0 without rope */
};

/* The run's k is [num_slots, 2 (1 + overlaps), D]: a token's value and then its gate; with overlaps
 * the value for the next row, for its own row, and the gates of both. q, v and lse are NULL. out,
 * [T, 1, D] of the activations' dtype: the row that token t finishes; where it finishes none, out
 * is left as it is. */
struct attn_io_compressor { /* on attn_step_io; runs that attend need it */
    struct attn_ext ext;    /* id ATTN_EXT_DRAFT_IO_COMPRESSOR */
    /* [r, (1 + overlaps) D]: added to the gates of a row's i-th token; NULL: none */
    const struct attn_tensor *position_bias;
    const struct attn_tensor *norm_weight; /* [D]: RMS norm of the pooled row; NULL: none */
    const struct attn_tensor *cos_sin;     /* [max position, rotary_dim], as attn_io_rope's */
    float norm_eps;                        /* finite, 0 or above */
    int32_t reserved;
};

#endif
