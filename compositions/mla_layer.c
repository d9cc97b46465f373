/* SPDX-License-Identifier: Apache-2.0 */
/* An MLA layer: what it needs of a backend, kv_b_proj seen as W_UK and W_UV per head, and the
 * layers that its kernels get. */
#include <stdio.h>

#include "ranks.h"
#include "mla.h"

#define MX_BLOCK 32

bool mla_per_head(const attn_layer *layer)
{
    return layer->served[ATTN_PHASE_PREFILL].composed & ATTN_COMPOSE_MLA_PREFILL;
}

attn_status mla_resolve(struct layer *layer, struct attn_error *error)
{
    struct attn_layer_desc *l = &layer->desc;
    if (layer->lists != NULL) {
        BAD_IF(layer->mla->topk != 0, "topk", "layer '%s': topk is %d next to attn_index_lists; 0",
               l->name, layer->mla->topk);
        layer->mla->topk = layer->lists->max_entries;
    }
    layer->is_latent = true;
    const bool is_sparse = layer->mla->topk > 0;
    layer->kernel = is_sparse ? ATTN_KERNEL_ATTEND_MLA_SPARSE : ATTN_KERNEL_ATTEND_MLA;
    layer->writes_apart = true; /* prefill attends no cache */
    layer->out_apart |= layer->mla->absorb_in_core != 0;
    const struct attn_mla_desc *m = layer->mla;
    BAD_IF(m->weight_dtype != ATTN_DTYPE_MXFP4 &&
               (m->weight_dtype < 0 || m->weight_dtype >= NUM_DTYPES),
           "weight_dtype", "layer '%s': weight_dtype is %d; 0 to %d, or %d (mxfp4)", l->name,
           m->weight_dtype, NUM_DTYPES - 1, ATTN_DTYPE_MXFP4);
    BAD_IF(m->context_workspace_tokens < 0, "context_workspace_tokens",
           "layer '%s': context_workspace_tokens is %lld; 0 (what fits) or above", l->name,
           (long long)m->context_workspace_tokens);
    BAD_IF(l->num_kv_heads != 1 || l->head_size != m->kv_lora_rank + m->qk_rope_head_dim,
           "head_size",
           "layer '%s': an MLA layer has one KV head of kv_lora_rank + qk_rope_head_dim = %d; "
           "num_kv_heads %d, head_size %d",
           l->name, m->kv_lora_rank + m->qk_rope_head_dim, l->num_kv_heads, l->head_size);
    BAD_IF(l->head_size_v != 0 && l->head_size_v != m->v_head_dim, "head_size_v",
           "layer '%s': head_size_v is %d; 0, or v_head_dim, %d", l->name, l->head_size_v,
           m->v_head_dim);
    l->head_size_v = m->v_head_dim;
    return ATTN_OK;
}

/* What prefill per head needs next to attend_mla: new keys projected, context gathered and
 * projected in chunks, merged. Missing parts become reasons under `field`, unless it is NULL. */
static bool can_prefill_per_head(struct check *check, const char *field)
{
    const struct attn_layer_desc *l = check->layer;
    const struct attn_backend_caps *caps = check->caps;
    const struct attn_mla_desc *mla = check->whole->mla;
    const uint64_t terms = ATTN_TERM_CAUSAL | ATTN_TERM_BIDIRECTIONAL;
    int32_t qk = mla->qk_nope_head_dim + mla->qk_rope_head_dim;
    bool qk_found;
    char sizes[64];
    snprintf(sizes, sizeof sizes, "attend of head_size %d, head_size_v %d", qk, mla->v_head_dim);
    return CHECK_NEEDS(
        check, field, {caps->kernels & ATTN_KERNEL_ATTEND, "attend over projected keys"},
        {caps->kernels & ATTN_KERNEL_GATHER_KV, "gather_kv of the context"},
        {caps->kernels & ATTN_KERNEL_MERGE_STATES, "merge_states of context and new keys"},
        {caps->kernels & ATTN_KERNEL_BATCHED_GEMM, "batched_gemm (projection of keys)"},
        {caps->features & ATTN_FEATURE_CONTIGUOUS_KV, "contiguous keys"},
        {caps->features & ATTN_FEATURE_LSE, "log-sum-exp"},
        {(caps->terms & terms) == terms, "causal and bidirectional attends", "not both"},
        {holds_head_sizes(caps, qk, mla->v_head_dim, &qk_found), sizes},
        {!l->has_window && l->chunk_size == 0 && l->alibi == ATTN_ALIBI_NONE && !l->prefix_lm,
         "a window, chunks, ALiBi or spans", "only latent, as decode"},
        {l->batch_invariant < 2, "the same bits with and without prefix caching",
         "only latent, as decode"},
        {!l->device_seq_lens_only && !l->host_bounds, "lengths on the device only", "host lengths"},
        {mla->absorb_in_core, "queries in latent space", "only latent, as decode"},
        {check->whole->caches == NULL, "caches beyond the latent rows", "only latent, as decode"});
}

/* Prefill goes per head where the parts are there, else in latent space if attend_mla takes any
 * number of queries. */
static void check_mla_prefill(struct check *check, const struct attn_mla_caps *caps)
{
    if (check->whole->mla->topk > 0) {
        return; /* sparse: all tokens go one way */
    }
    if (can_prefill_per_head(check, NULL)) {
        /* context chunks differ from step to step: captures hold decodes only */
        check_compose(check, ATTN_COMPOSE_MLA_PREFILL, ATTN_GRAPH_UNIFORM_BATCH);
    } else if (caps == NULL || caps->max_query_len > 0) {
        can_prefill_per_head(check, "mla_prefill");
        if (caps != NULL) {
            char supported[64];
            snprintf(supported, sizeof supported, "at most %d queries a request",
                     caps->max_query_len);
            reasons_add(check->reasons, "max_query_len", "prefill in latent space", supported);
        }
    }
}

/* Latent caches that ranks share. */
static void check_spread(struct check *check, int32_t phase)
{
    const struct attn_layer_desc *l = check->layer;
    const struct attn_mla_desc *mla = check->whole->mla;
    if (context_cache_ranks(check->whole->cp) == 1 || mla->topk > 0) {
        return;
    }
    CHECK_NEEDS(check, "context_parallel",
                {phase != ATTN_PHASE_PREFILL || check->match->composed & ATTN_COMPOSE_MLA_PREFILL,
                 "MLA's prefill in latent space", "per head, over gathered context"},
                {!l->has_sinks && l->num_speculative_tokens == 0 && mla->absorb_in_core &&
                     mla->padded_num_q_heads <= l->num_q_heads,
                 "MLA with sinks, drafts, padded heads or latent queries", "none of them"});
}

void mla_match(struct check *check, int32_t phase)
{
    const struct attn_mla_desc *mla = check->whole->mla;
    const struct attn_mla_caps *caps = ext_find(check->caps->next, ATTN_EXT_CAPS_MLA);
    if (mla->absorb_in_core) {
        check_need_kernel(check, ATTN_KERNEL_BATCHED_GEMM, " (absorb and project up)");
        check_compose(check, ATTN_COMPOSE_MLA, ATTN_GRAPH_ALWAYS);
        CHECK_NEEDS(check, "weight_dtype",
                    {mla->weight_dtype != ATTN_DTYPE_MXFP4 ||
                         check->caps->features & ATTN_FEATURE_MXFP4_WEIGHTS,
                     "mxfp4", "no batched_gemm of it"});
    }
    if (phase == ATTN_PHASE_PREFILL && check->caps->kernels & ATTN_KERNEL_ATTEND_MLA) {
        check_mla_prefill(check, caps);
    }
    check_spread(check, phase);
    if (caps == NULL) {
        if (check->caps->kernels & (ATTN_KERNEL_ATTEND_MLA | ATTN_KERNEL_ATTEND_MLA_SPARSE)) {
            reasons_add(check->reasons, "attn_mla_caps", "limits of MLA", "not declared");
        }
        return; /* without those kernels, their absence is the reason */
    }
    const char *entries = check->whole->lists != NULL ? "max_entries" : "topk";
    int32_t queries =
        1 + check->layer->num_speculative_tokens * (check->layer->parallel_drafting ? 2 : 1);
    int32_t heads =
        mla->padded_num_q_heads > 0 ? mla->padded_num_q_heads : check->layer->num_q_heads;
    CHECK_LIMITS(
        check,
        {"max_query_len", phase == ATTN_PHASE_DECODE ? queries : 0, MOST(caps->max_query_len)},
        {"kv_lora_rank", mla->kv_lora_rank, caps->kv_lora_rank_max},
        {"qk_rope_head_dim", mla->qk_rope_head_dim, caps->qk_rope_head_dim_max},
        {entries, mla->topk, MOST(caps->topk_max)});
    check_multiple(check, entries, mla->topk, caps->topk_multiple);
    check_multiple(check, "padded_num_q_heads", heads, caps->num_q_heads_multiple);
}

/* The dtype of the layer's weights, as described. */
static struct attn_dtype weight_dtype(const attn_layer *layer)
{
    static const struct attn_dtype mxfp4 = {ATTN_CODE_FLOAT4_E2M1FN, 4, 1};
    const int32_t declared = layer->selected->mla->weight_dtype;
    return declared == ATTN_DTYPE_MXFP4
               ? mxfp4
               : dtype_of_id(declared != ATTN_DTYPE_DEFAULT ? declared : layer->desc->dtype);
}

/* Rows of one head in kv_b_proj: nope of W_UK^T, then v of W_UV^T. Nothing is copied: both are
 * views. */
static attn_status split_projection(const attn_layer *layer, const struct attn_tensor *kv_b,
                                    struct mla_weights *own, struct attn_error *error)
{
    const struct attn_mla_desc *m = layer->selected->mla;
    int64_t heads = layer->desc->num_q_heads, rank = m->kv_lora_rank;
    int64_t nope = m->qk_nope_head_dim, v = m->v_head_dim, rows = heads * (nope + v);
    CHECK_TENSOR(kv_b, layer->desc->name, "kv_b_proj", 2, {rows, rank}, 0, weight_dtype(layer),
                 true);
    int64_t row = tensor_stride(kv_b, 0), column = tensor_stride(kv_b, 1), head = (nope + v) * row;
    uint8_t *data = tensor_data(kv_b);
    tensor_set(&own->uk.own, kv_b, data, heads, nope, rank, head, row, column);
    tensor_set(&own->uv.own, kv_b, data + nope * row * (kv_b->dtype.bits / 8), heads, rank, v, head,
               column, row);
    return ATTN_OK;
}

static attn_status take_weights(const attn_layer *layer, struct head_weights *w,
                                const struct attn_tensor *source, const char *name, int64_t rows,
                                int64_t columns, struct attn_error *error)
{
    CHECK_TENSOR(source, layer->desc->name, name, 3, {layer->desc->num_q_heads, rows, columns}, 0,
                 weight_dtype(layer), true);
    tensor_copy(&w->own, source);
    return ATTN_OK;
}

/* -1, which no tensor has, of what does not divide. */
static int64_t blocks_of(int64_t size)
{
    return size % MX_BLOCK == 0 ? size / MX_BLOCK : -1;
}

/* One e8m0 for each 32 elements along one of the last two dimensions. */
static attn_status take_block_scale(const attn_layer *layer, struct head_weights *w,
                                    const struct attn_tensor *scale, const char *name,
                                    struct attn_error *error)
{
    const int64_t *shape = w->own.shape;
    const bool rows =
        scale != NULL && scale->ndim == 3 && scale->shape != NULL && scale->shape[2] == shape[2];
    const bool bytes = scale != NULL && scale->dtype.code == ATTN_CODE_UINT;
    CHECK_TENSOR(
        scale, layer->desc->name, name, 3,
        {shape[0], rows ? blocks_of(shape[1]) : shape[1], rows ? shape[2] : blocks_of(shape[2])}, 0,
        {bytes ? ATTN_CODE_UINT : ATTN_CODE_FLOAT8_E8M0FNU, 8, 1}, true);
    tensor_copy(&w->block_scale, scale);
    return ATTN_OK;
}

static attn_status take_scale(const attn_layer *layer, struct head_weights *w,
                              const struct attn_tensor *scale, const char *name,
                              struct attn_error *error)
{
    int64_t heads = layer->desc->num_q_heads;
    if (layer->selected->mla->weight_dtype == ATTN_DTYPE_MXFP4) {
        return take_block_scale(layer, w, scale, name, error);
    }
    if (scale == NULL) {
        return ATTN_OK;
    }
    const bool one = scale->shape != NULL && scale->ndim == 1 && scale->shape[0] == 1;
    CHECK_TENSOR(scale, layer->desc->name, name, 1, {one ? 1 : heads}, 0,
                 dtype_of_id(ATTN_DTYPE_F32));
    w->scale = (const float *)tensor_data(scale);
    w->num_scales = scale->shape[0];
    return ATTN_OK;
}

static attn_status bind_weights(attn_layer *layer, struct attn_error *error)
{
    const struct attn_mla_desc *m = layer->selected->mla;
    const struct attn_mla_weights *weights =
        ext_find(layer->params->params.next, ATTN_EXT_MLA_WEIGHTS);
    BAD_IF(weights == NULL, "attn_mla_weights",
           "layer '%s' leaves the projections to the core and brings no weights",
           layer->desc->name);
    struct mla_weights *own = layer->data[COMPOSITION_MLA];
    *own = (struct mla_weights){.uk = {.scale = NULL}};
    BAD_IF(weights->kv_b_proj != NULL && m->weight_dtype == ATTN_DTYPE_MXFP4, "kv_b_proj",
           "layer '%s': kv_b_proj is given, and weight_dtype is %d (mxfp4), of which w_uk and w_uv "
           "alone are",
           layer->desc->name, m->weight_dtype);
    if (weights->kv_b_proj != NULL) {
        TRY(split_projection(layer, weights->kv_b_proj, own, error));
    } else {
        TRY(take_weights(layer, &own->uk, weights->w_uk, "w_uk", m->qk_nope_head_dim,
                         m->kv_lora_rank, error));
        TRY(take_weights(layer, &own->uv, weights->w_uv, "w_uv", m->kv_lora_rank, m->v_head_dim,
                         error));
    }
    TRY(take_scale(layer, &own->uk, weights->w_uk_scale, "w_uk_scale", error));
    return take_scale(layer, &own->uv, weights->w_uv_scale, "w_uv_scale", error);
}

/* Keys and values per head in contiguous memory, of the activations' dtype. */
static void rewrite_projected(attn_layer *layer, int32_t part)
{
    const struct attn_mla_desc *m = layer->selected->mla;
    struct attn_layer_desc *desc = &layer->parts[part];
    *desc = *layer->desc;
    desc->next = NULL;
    desc->kind = ATTN_LAYER_DECODER;
    desc->kv_dtype = desc->dtype;
    desc->k_scale_form = desc->v_scale_form = ATTN_SCALE_NONE;
    desc->num_kv_heads = desc->num_q_heads;
    desc->head_size = m->qk_nope_head_dim + m->qk_rope_head_dim;
    desc->head_size_v = m->v_head_dim;
    desc->output_form = ATTN_OUTPUT_PLAIN;
    desc->fast_prefill = 0;
    desc->needs_lse = 1;
    layer->part_params[part].next = NULL;
}

attn_status mla_bind(attn_layer *layer, struct attn_error *error)
{
    const struct attn_mla_desc *m = layer->selected->mla;
    struct attn_layer_desc *latent = &layer->parts[PART_MAIN];
    latent->head_size_v = m->kv_lora_rank;
    latent->num_q_heads = mla_padded_heads(layer);
    if (m->absorb_in_core) {
        latent->output_form = ATTN_OUTPUT_PLAIN; /* the up-projection's is `quantize`'s */
    }
    if (layer_is_spread(
            layer)) { /* decode: the heads of all ranks against the rows that are here */
        latent->num_q_heads *= layer->selected->cp->decode->world_size;
        latent->needs_lse = 1;
    }
    rewrite_projected(layer, PART_NEW);
    layer->part_params[PART_NEW].sinks = layer->part_params[PART_MAIN].sinks;
    rewrite_projected(layer, PART_CONTEXT);
    struct attn_layer_desc *context = &layer->parts[PART_CONTEXT];
    context->has_sinks = 0; /* they enter one part */
    context->causal = ATTN_CAUSAL_NO;
    context->causal_per_request = context->tree_mask = 0;
    layer->needed_params = m->absorb_in_core ? "weights" : layer->needed_params;
    return m->absorb_in_core && layer->params != NULL ? bind_weights(layer, error) : ATTN_OK;
}

int32_t mla_padded_heads(const attn_layer *layer)
{
    int32_t padded = layer->selected->mla->padded_num_q_heads, heads = layer->desc->num_q_heads;
    return padded > heads ? padded : heads;
}
