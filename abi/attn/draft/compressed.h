/* SPDX-License-Identifier: Apache-2.0 */
/* A draft (abi/README.md, Drafts): two caches under one softmax (DeepSeek-V4). A query sees a
 * window of its request's rows and, in the same softmax, rows of a second cache that stand for
 * several tokens each: all that are finished, or those of a list. docs/semantics.md, section 9.
 *
 * The layer is of kind MLA, its queries and output in latent space (absorb_in_core 0), so that a
 * row is key and value: DeepSeek-V4 has kv_lora_rank 512 and qk_rope_head_dim 0. Its one further
 * cache (attn_layer_caches) has role COMPRESSED, a table of its own, one head of the layer's
 * head_size and kv_dtype, and tokens_per_row 4 or 128. That table counts rows: seq_lens those that
 * a request has, floor(L / tokens_per_row) or more, and slot_mapping places of the rows that a run
 * brings in attn_io_caches, negative where a token finishes none. With attn_mla_desc.topk, the
 * attn_io_mla.topk_indices of a run are rows of that cache; the layer's other terms (window, sinks,
 * soft cap) are what they are without it. Norms and rotations are the engine's, and
 * so is pooling, or a compressor's (compressor.h).
 *
 * What a kernel sees: attends of two plain MLA layers, and merge_states (ATTN_COMPOSE_COMPRESSED).
 */
#ifndef ATTN_DRAFT_COMPRESSED_H
#define ATTN_DRAFT_COMPRESSED_H

#include "../version.h"

#define ATTN_EXT_DRAFT_COMPRESSED_ROWS 0x80cu /* struct attn_compressed_rows, of a layer */

/* A further ATTN_FEATURE_*, which backends declare whose attend_mla and attend_mla_sparse take
 * requests that see some rows of a cache or none, and blocks that others have, too. */
#define ATTN_FEATURE_DRAFT_COMPRESSED_ROWS (1ull << 20)

struct attn_compressed_rows { /* on attn_layer_desc, with attn_layer_caches */
    struct attn_ext ext;      /* id ATTN_EXT_DRAFT_COMPRESSED_ROWS */
    int32_t reserved;         /* 0 */
};

#endif
