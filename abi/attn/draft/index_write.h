/* SPDX-License-Identifier: Apache-2.0 */
/* A draft (abi/README.md, Drafts): the write of an indexer's keys changes each key before it stores
 * it: norm, rotation, Hadamard transform, in this order, those that the layer asks for. Formulas:
 * docs/semantics.md, section 8.
 *
 *     DeepSeek-V3.2                LAYER norm; NeoX, the first 64 of 128 dims; Hadamard
 *     GLM-5                        LAYER norm; GPT-J, the first 64 of 128 dims
 *     MiniMax-M3                   RMS norm; NeoX, the first 64 of 128 dims
 *     Qwen4-Exp                    RMS norm of the mean of 4 keys; NeoX, the first 64 of 128 dims
 *
 * The engine rotates and transforms queries.
 *
 * A kernel finds attn_index_write on the layer and attn_io_index_write in the arguments of
 * write_kv. It reads k and does not change it. */
#ifndef ATTN_DRAFT_INDEX_WRITE_H
#define ATTN_DRAFT_INDEX_WRITE_H

#include "../tensor.h"

#define ATTN_EXT_DRAFT_INDEX_WRITE 0x817u    /* struct attn_index_write, of a layer */
#define ATTN_EXT_DRAFT_IO_INDEX_WRITE 0x818u /* struct attn_io_index_write, of a run */

/* A further ATTN_FEATURE_*: write_kv serves indexers with both; needs write_kv and kind indexer. */
#define ATTN_FEATURE_DRAFT_INDEX_WRITE (1ull << 22)

enum attn_key_norm {
    ATTN_KEY_NORM_NONE = 0,
    ATTN_KEY_NORM_RMS = 1,  /* x / sqrt(mean x^2 + eps) */
    ATTN_KEY_NORM_LAYER = 2 /* (x - mean x) / sqrt(mean (x - mean x)^2 + eps) */
};

struct attn_index_write { /* on attn_layer_desc, of kind indexer; asks for one step at least */
    struct attn_ext ext;  /* id ATTN_EXT_DRAFT_INDEX_WRITE */
    int32_t norm;         /* enum attn_key_norm */
    int32_t rope;         /* enum attn_rope */
    int32_t rotary_dim;   /* even: dims that are rotated; 0 without rope */
    int32_t rotary_first; /* the first of them, even or odd; 0 without rope */
    int32_t hadamard;     /* 1: Sylvester's matrix times 1 / sqrt(D); D is a power of two */
    int32_t reserved;     /* 0 */
};

/* What belongs to a step that the layer does not ask for is NULL, or 0. Where a token finishes no
 * row of the cache, its row of k and its position may hold anything. */
struct attn_io_index_write {               /* on attn_step_io; runs that write need it */
    struct attn_ext ext;                   /* id ATTN_EXT_DRAFT_IO_INDEX_WRITE */
    const int64_t *positions;              /* device [num_slots], one of each row of k; with rope */
    const struct attn_tensor *cos_sin;     /* [any, rotary_dim], as attn_io_rope's; with rope */
    const struct attn_tensor *norm_weight; /* [D]; with a norm */
    const struct attn_tensor *norm_bias;   /* [D]; with a LAYER norm, where NULL is no bias */
    float norm_eps;                        /* finite, 0 or above; with a norm */
    int32_t reserved;
};

#endif
