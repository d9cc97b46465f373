/* SPDX-License-Identifier: Apache-2.0 */
/* MLA. Decode: q_nope W_UK, attend_mla, W_UV. Prefill: new keys and chunks of context projected per
 * head, attended and merged; or as decode, where the backend's parts do not allow it, and always if
 * sparse. Latent caches may be shared by ranks. mla_layer.c binds a layer, mla.c plans, mla_run.c
 * runs. */
#ifndef COMPOSITIONS_MLA_H
#define COMPOSITIONS_MLA_H

#include "compositions.h"
#include "step/plan_state.h"

/* One projection, [Hq, rows, columns], over the engine's memory. */
struct head_weights {
    struct own_tensor own;
    const float *scale; /* or NULL */
    int64_t num_scales;
    struct own_tensor block_scale; /* mxfp4: its data is not NULL */
};

/* A layer's weights: [Hq, nope, kv_lora_rank], [Hq, kv_lora_rank, v]. */
struct mla_weights {
    struct head_weights uk, uv;
};

/* Rows of context that prefill gathers and projects at a time, by the last plan. */
struct context_chunk {
    int32_t first_req, num_reqs; /* in the prefill view */
    int32_t num_rows;
    const int32_t *first_key; /* host, [num_reqs] */
    const int32_t *start;     /* host, [num_reqs + 1]: rows that are gathered, on each rank */
    /* the keys that these are, of all ranks: as start, but in a spread cache */
    const int32_t *key_start;
    const int32_t *rank_rows; /* host, [num_reqs, n]: spread caches */
};

/* What a plan keeps. */
struct mla_plan {
    struct context_chunk *chunks;
    int32_t max_chunks, num_chunks;
    bool invariant;      /* chunks cut each request by its own length alone */
    int32_t chunk_rows;  /* most rows of a chunk */
    int32_t gather_rows; /* those of them on each rank */
    /* [n, n] of the activations' dtype, which copies rows by batched_gemm */
    int32_t identity_size;
    const void *identity; /* device; by the last plan */
    /* the prefill view with host arrays of the plan's own; over its own keys, contiguous, rows as
     * queries; over the first chunk of its context */
    struct attn_batch context, own_keys, first_chunk;
    struct {                         /* places in the workspace */
        size_t latent_q, latent_out; /* [decode tokens, Hq, kv_lora_rank] */
        size_t q;               /* [T, Hq, nope + rope], where its parts are not side by side */
        size_t rows;            /* [context rows, kv_lora_rank + rope] */
        size_t local, gathered; /* the same rows of this rank and of all: spread caches */
        size_t k, v;            /* [T or context rows, Hq, nope + rope or v] */
    } at;
};

static inline struct mla_plan *mla_plan(const attn_plan *plan)
{
    return plan->data[COMPOSITION_MLA];
}

/* mla_layer.c: see struct composition */
attn_status mla_resolve(struct layer *layer, struct attn_error *error);
void mla_match(struct check *check, int32_t phase);
attn_status mla_bind(attn_layer *layer, struct attn_error *error);
int32_t mla_padded_heads(const attn_layer *layer);

/* lists.c: are the layer's lists what attn_mla_desc.topk and attn_io_mla.topk_indices say, too? */
bool lists_are_plain(const struct layer *layer);

/* Is this layer's prefill per head? */
bool mla_per_head(const attn_layer *layer);
/* mla_run.c: the batch of one chunk, over the plan's own arrays. */
void mla_chunk_view(const attn_plan *plan, const struct context_chunk *chunk,
                    struct attn_batch *view);

extern step_program mla_run;    /* mla_run.c */
extern step_check mla_check_io; /* mla_run.c */

#endif
