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
 * Or, of backends that say so (attn_compressed_caps), one attend of the whole layer
 * (ATTN_COMPOSE_BOTH_CACHES).
 */
#ifndef ATTN_DRAFT_COMPRESSED_H
#define ATTN_DRAFT_COMPRESSED_H

#include "../version.h"

#define ATTN_EXT_DRAFT_COMPRESSED_ROWS 0x80cu /* struct attn_compressed_rows, of a layer */
#define ATTN_EXT_DRAFT_COMPRESSED_CAPS 0x815u /* struct attn_compressed_caps, of a backend */
#define ATTN_EXT_DRAFT_BOTH_CACHES 0x816u     /* struct attn_both_caches, of a kernel's layer */

/* A further ATTN_FEATURE_*, which backends declare whose attend_mla and attend_mla_sparse take
 * requests that see some rows of a cache or none, and blocks that others have, too. */
#define ATTN_FEATURE_DRAFT_COMPRESSED_ROWS (1ull << 20)

struct attn_compressed_rows { /* on attn_layer_desc, with attn_layer_caches */
    struct attn_ext ext;      /* id ATTN_EXT_DRAFT_COMPRESSED_ROWS */
    int32_t reserved;         /* 0 */
};

/* On attn_backend_caps: the layers that attend_mla, or with a topk attend_mla_sparse, attends to as
 * a whole, in both phases, any batch, with ATTN_FEATURE_MIXED_BATCH: those without a rotary part
 * (qk_rope_head_dim) and without scales of queries or probabilities. What attends in parts need
 * (ATTN_FEATURE_DRAFT_COMPRESSED_ROWS, merge_states) is still asked for: a layer whose other phase
 * is another backend's is attended to in parts. */
struct attn_compressed_caps {
    struct attn_ext ext;
    uint64_t kv_dtypes;   /* mask of enum attn_kv_dtype: of both caches, never AUTO */
    uint32_t dtypes;      /* mask of enum attn_dtype_id: activations */
    int32_t head_size;    /* 0: any */
    int32_t num_q_heads;  /* at most so many heads, or a multiple of so many; 0: any */
    int32_t kv_alignment; /* divides a block of either cache, with its scales; 0: any */
};

/* Comes first in the `next` of such a layer, in prepare, schedule and attend, whose args->caches[0]
 * is the second cache and whose batch->tables[caches[0].table - 1] addresses it. A query at
 * position p sees rows c < floor((p + 1) / caches[0].tokens_per_row), with a topk those of its
 * list. What the run brings of them has been written. The core sets it, engines do not. */
struct attn_both_caches {
    struct attn_ext ext;
};

#endif
