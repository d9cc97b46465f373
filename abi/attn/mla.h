/* SPDX-License-Identifier: Apache-2.0 */
/* Multi-head latent attention (DeepSeek-V2/V3), dense and sparse: what a layer, its weights and a
 * step add. Latent row = [c : kv_lora_rank | k_pe : rope], one KV head. Layer fields: num_kv_heads
 * 1, head_size kv_lora_rank + rope, head_size_v = v. W_UK and W_UV are kv_b_proj, transposed,
 * [kv_lora_rank, Hq, nope + v], split per head.
 *
 * What a kernel sees. attend_mla, attend_mla_sparse: queries and output in latent space; a layer
 * copy with head_size_v kv_lora_rank; q [T, Hq, kv_lora_rank + rope], or NULL, and attn_io_mla on
 * the arguments brings q_nope [T, Hq, kv_lora_rank] and q_pe [T, Hq, rope]; out [T, Hq,
 * kv_lora_rank]; k_cache is the latent view of one head, v_cache NULL; the value of a key is the
 * first kv_lora_rank of its row. Sparse: key i of a query is topk_indices[t, i]; terms of the layer
 * (causality, a window) still hide keys; an index that is listed twice counts twice. write_kv: k
 * [T, 1, kv_lora_rank + rope], or NULL, and attn_io_mla brings kv_c and k_pe. gather_kv: whole
 * rows, [rows, 1, kv_lora_rank + rope]. k_scale is the one scale of an fp8 row.
 *
 * Prefill per head (ATTN_COMPOSE_MLA_PREFILL) attends to a step's new rows as they came, kv_c and
 * k_pe, and to earlier ones as the cache holds them: with a quantized cache the next step reads the
 * same rows rounded. The latent way reads all of them from the cache. */
#ifndef ATTN_MLA_H
#define ATTN_MLA_H

#include "tensor.h"

struct attn_mla_desc {    /* on attn_layer_desc */
    struct attn_ext ext;  /* id ATTN_EXT_MLA_DESC */
    int32_t kv_lora_rank; /* 512 */
    int32_t qk_nope_head_dim;
    int32_t qk_rope_head_dim;
    int32_t v_head_dim;
    int32_t topk; /* sparse: k, positions per query token; 0: dense */
    /* 1: q_nope and kv_b_proj come to the core, which absorbs and projects up; 0: the decode query
     * arrives in latent space and the output leaves in it */
    int32_t absorb_in_core;
    /* heads of q_nope, q_pe, lse, sinks and, without absorption, out, as the engine allocated them:
     * the first num_q_heads count, the others may hold anything; 0: as num_q_heads. Kernels see
     * this number. */
    int32_t padded_num_q_heads;
    /* enum attn_dtype_id of W_UK and W_UV as held, 0: as the activations; fp8 with scales; MXFP4 */
    int32_t weight_dtype;
    /* rows of context gathered at a time in prefill; 0: what fits */
    int64_t context_workspace_tokens;
};

struct attn_mla_weights { /* on attn_layer_params */
    struct attn_ext ext;  /* id ATTN_EXT_MLA_WEIGHTS */
    /* [Hq (nope + v), kv_lora_rank], as the checkpoint has it */
    const struct attn_tensor *kv_b_proj;
    const struct attn_tensor *w_uk; /* or already split: [Hq, nope, kv_lora_rank] */
    const struct attn_tensor *w_uv; /* [Hq, kv_lora_rank, v] */
    /* float32 [1] or [Hq], for quantized weights; NULL: none. Mxfp4, of w_uk and w_uv only: e8m0 of
     * w_uk's (w_uv's) shape, one of its last two dimensions divided by 32 */
    const struct attn_tensor *w_uk_scale;
    const struct attn_tensor *w_uv_scale;
};

/* What an MLA run takes instead of q, k, v. Decode: q_nope [T, Hq, nope] (or latent [T, Hq,
 * kv_lora_rank] without absorption) and q_pe [T, Hq, rope]. New rows: kv_c [T, kv_lora_rank]
 * (normalised) and k_pe [T, rope]. Output [T, Hq, v] in attn_step_io.out ([T, Hq, kv_lora_rank]
 * without absorption). */
struct attn_io_mla {     /* on attn_step_io */
    struct attn_ext ext; /* id ATTN_EXT_IO_MLA */
    const struct attn_tensor *q_nope;
    const struct attn_tensor *q_pe;
    const struct attn_tensor *kv_c;
    const struct attn_tensor *k_pe;
    /* sparse: device [T, topk], positions in the request; -1 or out of range: none */
    const int32_t *topk_indices;
    int64_t topk_stride; /* elements between tokens */
};

struct attn_mla_caps {   /* on attn_backend_caps */
    struct attn_ext ext; /* id ATTN_EXT_CAPS_MLA */
    int32_t kv_lora_rank_max;
    int32_t qk_rope_head_dim_max;
    int32_t num_q_heads_multiple; /* heads are padded to it; 0 or 1: any */
    int32_t max_query_len;        /* queries per request on the decode way; 0: any */
    int32_t topk_max;
    int32_t topk_multiple;
};

#endif
