/* SPDX-License-Identifier: Apache-2.0 */
/* MLA and GDN layers against what a backend declares in its extensions. */
#include <stdio.h>

#include "select/match_check.h"
#include "util/structs.h"

/* A pair of head sizes that attend is not asked for by the layer itself. */
static bool holds_head_sizes(const struct attn_backend_caps *caps, int32_t qk, int32_t v)
{
    for (int32_t i = 0; i < caps->num_head_sizes; i++) {
        const struct attn_head_size_range *range = &caps->head_sizes[i];
        if (range_holds(&range->qk, 1, qk) &&
            (range->same ? v == qk : range_holds(&range->v, 1, v))) {
            return true;
        }
    }
    return false;
}

/* What prefill per head needs beside attend_mla: new keys projected, context gathered and projected
 * in chunks, merged. With `tell` each missing part becomes a reason. */
static bool can_prefill_per_head(struct check *check, bool tell)
{
    static const char field[] = "mla_prefill";
    const struct attn_layer_desc *l = check->layer;
    const struct attn_backend_caps *caps = check->caps;
    const struct attn_mla_desc *mla = check->whole->mla;
    const uint64_t terms = ATTN_TERM_CAUSAL | ATTN_TERM_BIDIRECTIONAL;
    int32_t qk = mla->qk_nope_head_dim + mla->qk_rope_head_dim;
    char sizes[64];
    snprintf(sizes, sizeof sizes, "attend of head_size %d, head_size_v %d", qk, mla->v_head_dim);
    const struct {
        bool there;
        const char *asked;
        const char *supported;
    } parts[] = {
        {caps->kernels & ATTN_KERNEL_ATTEND, "attend over projected keys", "no"},
        {caps->kernels & ATTN_KERNEL_GATHER_KV, "gather_kv of the context", "no"},
        {caps->kernels & ATTN_KERNEL_MERGE_STATES, "merge_states of context and new keys", "no"},
        {caps->kernels & ATTN_KERNEL_BATCHED_GEMM, "batched_gemm (projection of keys)", "no"},
        {caps->features & ATTN_FEATURE_CONTIGUOUS_KV, "contiguous keys", "no"},
        {caps->features & ATTN_FEATURE_LSE, "log-sum-exp", "no"},
        {(caps->terms & terms) == terms, "causal and bidirectional attends", "not both"},
        {holds_head_sizes(caps, qk, mla->v_head_dim), sizes, "no"},
        {!l->has_window && l->chunk_size == 0 && l->alibi == ATTN_ALIBI_NONE && !l->prefix_lm,
         "a window, chunks, ALiBi or spans", "only latent, as decode"},
        {l->batch_invariant < 2, "the same bits with and without prefix caching",
         "only latent, as decode"},
        {!l->device_seq_lens_only, "lengths on the device only", "host lengths"},
        {mla->absorb_in_core, "queries in latent space", "only latent, as decode"},
    };
    bool all = true;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        all &= parts[i].there;
        if (!parts[i].there && tell) {
            reasons_add(check->reasons, field, parts[i].asked, parts[i].supported);
        }
    }
    return all;
}

/* Prefill goes per head where the parts are there, else in latent space if attend_mla takes any
 * number of queries. */
static void hold_mla_prefill(struct check *check, const struct attn_mla_caps *caps)
{
    if (check->layer->kind != ATTN_LAYER_MLA) {
        return; /* sparse: all tokens go one way */
    }
    if (can_prefill_per_head(check, false)) {
        /* context chunks differ from step to step: captures hold decodes only */
        check_compose(check, ATTN_COMPOSE_MLA_PREFILL, ATTN_GRAPH_UNIFORM_BATCH);
    } else if (caps == NULL || caps->max_query_len > 0) {
        can_prefill_per_head(check, true);
        if (caps != NULL) {
            char supported[64];
            snprintf(supported, sizeof supported, "at most %d queries a request",
                     caps->max_query_len);
            reasons_add(check->reasons, "max_query_len", "prefill in latent space", supported);
        }
    }
}

void check_mla(struct check *check, int32_t phase)
{
    const struct attn_mla_desc *mla = check->whole->mla;
    const struct attn_mla_caps *caps =
        (const struct attn_mla_caps *)ext_find(check->caps->next, ATTN_EXT_CAPS_MLA, sizeof *caps);
    if (mla == NULL) {
        return;
    }
    if (mla->absorb_in_core) {
        check_need_kernel(check, ATTN_KERNEL_BATCHED_GEMM, "batched_gemm (absorb and project up)");
        check_compose(check, ATTN_COMPOSE_MLA, ATTN_GRAPH_ALWAYS);
        if (mla->weight_dtype == ATTN_MLA_WEIGHT_MXFP4 &&
            !(check->caps->features & ATTN_FEATURE_MXFP4_WEIGHTS)) {
            reasons_add(check->reasons, "weight_dtype", "mxfp4", "no batched_gemm of it");
        }
    }
    if (phase == ATTN_PHASE_PREFILL && check->caps->kernels & ATTN_KERNEL_ATTEND_MLA) {
        hold_mla_prefill(check, caps);
    }
    if (caps == NULL) {
        if (check->caps->kernels & (ATTN_KERNEL_ATTEND_MLA | ATTN_KERNEL_ATTEND_MLA_SPARSE)) {
            reasons_add(check->reasons, "attn_mla_caps", "limits of MLA", "not declared");
        }
        return; /* else the missing kernel says it */
    }
    int32_t queries =
        1 + check->layer->num_speculative_tokens * (check->layer->parallel_drafting ? 2 : 1);
    if (phase == ATTN_PHASE_DECODE && caps->max_query_len > 0 && queries > caps->max_query_len) {
        check_refuse_limit(check, "max_query_len", queries, caps->max_query_len);
    }
    if (mla->kv_lora_rank > caps->kv_lora_rank_max) {
        check_refuse_limit(check, "kv_lora_rank", mla->kv_lora_rank, caps->kv_lora_rank_max);
    }
    if (mla->qk_rope_head_dim > caps->qk_rope_head_dim_max) {
        check_refuse_limit(check, "qk_rope_head_dim", mla->qk_rope_head_dim,
                           caps->qk_rope_head_dim_max);
    }
    if (mla->topk > 0 && caps->topk_max > 0 && mla->topk > caps->topk_max) {
        check_refuse_limit(check, "topk", mla->topk, caps->topk_max);
    }
    if (mla->topk > 0 && caps->topk_multiple > 1 && mla->topk % caps->topk_multiple != 0) {
        char supported[48];
        snprintf(supported, sizeof supported, "multiples of %d", caps->topk_multiple);
        check_refuse_number(check, "topk", mla->topk, supported);
    }
    int32_t heads =
        mla->padded_num_q_heads > 0 ? mla->padded_num_q_heads : check->layer->num_q_heads;
    if (caps->num_q_heads_multiple > 1 && heads % caps->num_q_heads_multiple != 0) {
        char supported[48];
        snprintf(supported, sizeof supported, "multiples of %d", caps->num_q_heads_multiple);
        check_refuse_number(check, "padded_num_q_heads", heads, supported);
    }
}

void check_gdn(struct check *check)
{
    const struct attn_gdn_desc *gdn = check->whole->gdn;
    const struct attn_gdn_caps *caps =
        (const struct attn_gdn_caps *)ext_find(check->caps->next, ATTN_EXT_CAPS_GDN, sizeof *caps);
    if (gdn == NULL) {
        return;
    }
    if (caps == NULL) {
        if (check->caps->kernels & ATTN_KERNEL_GATED_DELTA) {
            reasons_add(check->reasons, "attn_gdn_caps", "limits of GDN", "not declared");
        }
        return;
    }
    if (gdn->head_size_k > caps->head_size_k_max) {
        check_refuse_limit(check, "head_size_k", gdn->head_size_k, caps->head_size_k_max);
    }
    if (gdn->head_size_v > caps->head_size_v_max) {
        check_refuse_limit(check, "head_size_v", gdn->head_size_v, caps->head_size_v_max);
    }
    if (gdn->conv_width > caps->conv_width_max) {
        check_refuse_limit(check, "conv_width", gdn->conv_width, caps->conv_width_max);
    }
    if (gdn->num_speculative_tokens > caps->max_speculative_tokens) {
        check_refuse_limit(check, "num_speculative_tokens", gdn->num_speculative_tokens,
                           caps->max_speculative_tokens);
    }
}
