/* SPDX-License-Identifier: Apache-2.0 */
#include "select/match.h"

#include <stdio.h>

#include "select/composition.h"
#include "select/index_lists.h"
#include "select/layer_caches.h"
#include "select/match_check.h"
#include "select/names.h"
#include "util/structs.h"
#include "util/counts.h"

static void need_term(struct check *check, uint64_t term, const char *field, const char *asked)
{
    if (!(check->caps->terms & term)) {
        reasons_add(check->reasons, field, asked, "no");
    }
}

/* A kind is served because it is declared, or because the core can compose it of parts that are. */
static void hold_kind(struct check *check)
{
    const struct attn_backend_caps *caps = check->caps;
    int32_t kind = check->layer->kind;
    bool bidirectional = (caps->terms & ATTN_TERM_BIDIRECTIONAL) != 0;
    bool decoder = (caps->layer_kinds >> ATTN_LAYER_DECODER & 1) != 0;
    bool contiguous = (caps->features & ATTN_FEATURE_CONTIGUOUS_KV) != 0;
    if (caps->layer_kinds >> kind & 1) {
        return;
    }
    if (kind == ATTN_LAYER_CROSS && decoder && bidirectional) {
        check_compose(check, ATTN_COMPOSE_CROSS, ATTN_GRAPH_ALWAYS);
    } else if (!layer_has_cache(check->layer) && contiguous && bidirectional) {
        check_compose(check, ATTN_COMPOSE_ENCODER, ATTN_GRAPH_ALWAYS);
    } else {
        check_code(check, "layer_kind", ATTN_NAMES_LAYER_KIND, kind, caps->layer_kinds);
    }
}

static void hold_terms(struct check *check)
{
    const struct attn_layer_desc *l = check->layer;
    char asked[64];
    if (l->causal == ATTN_CAUSAL_YES) {
        need_term(check, ATTN_TERM_CAUSAL, "causal", "yes");
    } else {
        need_term(check, ATTN_TERM_BIDIRECTIONAL, "causal", "no (bidirectional)");
    }
    if (l->causal_per_request) {
        need_term(check, ATTN_TERM_CAUSAL_PER_REQUEST, "causal_per_request", "yes");
    }
    if (l->has_window) {
        bool symmetric = l->causal != ATTN_CAUSAL_YES && l->window_right != 0;
        snprintf(asked, sizeof asked, "(%d, %d)", l->window_left, l->window_right);
        need_term(check, symmetric ? ATTN_TERM_SYMMETRIC_WINDOW : ATTN_TERM_SLIDING_WINDOW,
                  symmetric ? "symmetric_window" : "sliding_window", asked);
    }
    if (l->soft_cap > 0) {
        snprintf(asked, sizeof asked, "%g", (double)l->soft_cap);
        need_term(check, ATTN_TERM_SOFT_CAP, "soft_cap", asked);
    }
    if (l->alibi == ATTN_ALIBI_LINEAR) {
        need_term(check, ATTN_TERM_ALIBI, "alibi", "linear");
    } else if (l->alibi == ATTN_ALIBI_SQRT) {
        need_term(check, ATTN_TERM_ALIBI_SQRT, "alibi_sqrt", "yes");
    }
    if (l->has_sinks) {
        need_term(check, ATTN_TERM_SINKS, "sinks", "yes");
    }
    if (l->prefix_lm) {
        need_term(check, ATTN_TERM_PREFIX_LM, "prefix_lm", "yes");
    }
    if (l->tree_mask == ATTN_TREE_BITS) {
        need_term(check, ATTN_TERM_TREE_BITS, "tree_mask", "bits");
    } else if (l->tree_mask == ATTN_TREE_BIAS) {
        need_term(check, ATTN_TERM_TREE_BIAS, "tree_mask", "bias");
    }
}

static void hold_kernels(struct check *check)
{
    check_need_kernel(check, check->whole->kernel, "");
    if (check->whole->has_states) {
        return;
    }
    if (!layer_has_cache(check->layer)) {
        check_need_feature(check, true, ATTN_FEATURE_CONTIGUOUS_KV, "contiguous_kv", "yes");
        return;
    }
    check_need_feature(check, true, ATTN_FEATURE_PAGED_KV, "paged_kv", "yes");
    bool fused = check->caps->features & ATTN_FEATURE_FUSED_WRITE && !check->whole->writes_apart;
    if (check->whole->sharing_target < 0 && !fused) {
        check_need_kernel(check, ATTN_KERNEL_WRITE_KV, "");
    }
}

/* The layout that an engine has, where it says so. */
static void hold_view_forms(struct check *check)
{
    for (int32_t i = 0; i < NUM_VIEW_FORMS; i++) {
        if (check->layer->needed_view_forms >> i & 1) {
            check_code(check, "needed_view_forms", ATTN_NAMES_VIEW_FORM, i,
                       check->caps->view_forms);
        }
    }
}

static void hold_quantization(struct check *check)
{
    const struct attn_layer_desc *l = check->layer;
    const struct attn_backend_caps *caps = check->caps;
    if (layer_has_cache(l) && !check->whole->has_states) {
        check_need_feature(check, l->kv_dtype_v != 0, ATTN_FEATURE_KV_DTYPE_V, "kv_dtype_v",
                           code_text(ATTN_NAMES_KV_DTYPE, l->kv_dtype_v).text);
        for (int32_t is_v = 0; is_v < (l->kv_dtype_v != 0 ? 2 : 1); is_v++) {
            /* `auto` in the mask stands for a cache of the activations' dtype. */
            const int32_t dtype = kv_dtype_of(l, is_v);
            if (!(caps->kv_dtypes >> ATTN_KV_AUTO & 1 && dtype == l->dtype)) {
                check_code(check, is_v ? "kv_dtype_v" : "kv_dtype", ATTN_NAMES_KV_DTYPE, dtype,
                           caps->kv_dtypes);
            }
        }
        if (kv_is_fp8(l->kv_dtype) ||
            (kv_is_opaque(l->kv_dtype) && l->k_scale_form != ATTN_SCALE_NONE)) {
            check_code(check, "k_scale_form", ATTN_NAMES_SCALE_FORM, l->k_scale_form,
                       caps->k_scale_forms);
        }
        if (kv_is_fp8(kv_dtype_of(l, true)) ||
            (kv_is_opaque(kv_dtype_of(l, true)) && l->v_scale_form != ATTN_SCALE_NONE)) {
            check_code(check, "v_scale_form", ATTN_NAMES_SCALE_FORM, l->v_scale_form,
                       caps->v_scale_forms);
        }
    }
    if (l->p_scale_form != ATTN_SCALE_NONE) {
        check_code(check, "p_scale_form", ATTN_NAMES_SCALE_FORM, l->p_scale_form,
                   caps->p_scale_forms);
    }
    if (l->q_scale_form != ATTN_SCALE_NONE) {
        check_need_feature(check, true, ATTN_FEATURE_QUANTIZED_QUERY, "q_scale_form",
                           name_of_scale_form(l->q_scale_form));
        check_code(check, "q_dtype", ATTN_NAMES_DTYPE, l->q_dtype, caps->q_dtypes);
    }
}

static void hold_features(struct check *check, int32_t phase)
{
    const struct attn_layer_desc *l = check->layer;
    check_need_feature(check, l->needs_lse, ATTN_FEATURE_LSE, "lse", "yes");
    check_need_feature(check, l->needs_block_table_row, ATTN_FEATURE_BLOCK_TABLE_ROW,
                       "block_table_row", "yes");
    check_need_feature(check, l->device_seq_lens_only, ATTN_FEATURE_DEVICE_SEQ_LENS,
                       "device_seq_lens_only", "yes");
    check_need_feature(check, l->host_bounds, ATTN_FEATURE_HOST_BOUNDS, "host_bounds", "yes");
    if (l->needs_page_lists && check->caps->device.type != ATTN_DEVICE_CPU) {
        check_need_kernel(check, ATTN_KERNEL_MAKE_BLOCK_TABLE, "");
    }
    check_need_feature(check, l->fast_prefill, ATTN_FEATURE_FAST_PREFILL, "fast_prefill", "yes");
    check_need_feature(check, l->rope != 0, ATTN_FEATURE_FUSED_ROPE, "rope", "yes");
    check_need_feature(check, l->qk_norm != 0, ATTN_FEATURE_FUSED_ROPE_NORM, "qk_norm", "yes");
    check_need_feature(check, l->batch_invariant >= 1, ATTN_FEATURE_BATCH_INVARIANT,
                       "batch_invariant", "yes");
    check_need_feature(check, l->batch_invariant >= 2, ATTN_FEATURE_BATCH_INVARIANT_PREFIX,
                       "batch_invariant", "with prefix caching");
    uint64_t missing = l->needed_features & ~check->caps->features;
    for (int32_t i = 0; i < NUM_FEATURES; i++) {
        if (missing >> i & 1) {
            check_refuse_number(check, "needed_features", i, "bits of the backend's features");
        }
    }
    /* The levels below ALWAYS speak of the decode way only. */
    if (l->graph_level > check->match->graph_level &&
        (phase == ATTN_PHASE_DECODE || l->graph_level == ATTN_GRAPH_ALWAYS)) {
        reasons_add(check->reasons, "graph_level", name_of_graph_level(l->graph_level),
                    name_of_graph_level(check->match->graph_level));
    }
    int32_t n = l->num_speculative_tokens * (l->parallel_drafting ? 2 : 1);
    int32_t longest = check->caps->graph_max_query_len;
    if (phase == ATTN_PHASE_DECODE && l->graph_level > ATTN_GRAPH_NEVER &&
        l->graph_level < ATTN_GRAPH_ALWAYS && longest > 0 && 1 + n > longest) {
        check_refuse_limit(check, "graph_max_query_len", 1 + n, longest);
    }
    int32_t most = check->caps->max_speculative_tokens;
    if (phase == ATTN_PHASE_DECODE && most > 0 && n > most) {
        check_refuse_limit(check, "num_speculative_tokens", n, most);
    }
}

static uint64_t terms_of(const struct attn_layer_desc *l, uint32_t composed)
{
    uint64_t terms = l->causal == ATTN_CAUSAL_YES ? ATTN_TERM_CAUSAL : ATTN_TERM_BIDIRECTIONAL;
    terms |= l->causal_per_request ? ATTN_TERM_CAUSAL_PER_REQUEST : 0;
    if (l->has_window) {
        terms |= l->causal != ATTN_CAUSAL_YES && l->window_right != 0 ? ATTN_TERM_SYMMETRIC_WINDOW
                                                                      : ATTN_TERM_SLIDING_WINDOW;
    }
    terms |= l->chunk_size > 0 && !(composed & ATTN_COMPOSE_CHUNKED) ? ATTN_TERM_CHUNKED_LOCAL : 0;
    terms |= l->soft_cap > 0 ? ATTN_TERM_SOFT_CAP : 0;
    terms |= l->alibi == ATTN_ALIBI_LINEAR ? ATTN_TERM_ALIBI : 0;
    terms |= l->alibi == ATTN_ALIBI_SQRT ? ATTN_TERM_ALIBI_SQRT : 0;
    terms |= l->has_sinks ? ATTN_TERM_SINKS : 0;
    terms |= l->sink_len > 0 && !(composed & ATTN_COMPOSE_STATIC_SINK) ? ATTN_TERM_STATIC_SINK : 0;
    terms |= l->prefix_lm ? ATTN_TERM_PREFIX_LM : 0;
    terms |= l->tree_mask == ATTN_TREE_BITS ? ATTN_TERM_TREE_BITS : 0;
    terms |= l->tree_mask == ATTN_TREE_BIAS ? ATTN_TERM_TREE_BIAS : 0;
    return terms;
}

static uint64_t features_of(const struct attn_layer_desc *l)
{
    uint64_t features = layer_has_cache(l) ? ATTN_FEATURE_PAGED_KV : ATTN_FEATURE_CONTIGUOUS_KV;
    features |= l->needs_lse ? ATTN_FEATURE_LSE : 0;
    features |= l->needs_block_table_row ? ATTN_FEATURE_BLOCK_TABLE_ROW : 0;
    features |= l->host_bounds ? ATTN_FEATURE_HOST_BOUNDS : 0;
    features |= l->device_seq_lens_only ? ATTN_FEATURE_DEVICE_SEQ_LENS : 0;
    features |= l->q_scale_form != ATTN_SCALE_NONE ? ATTN_FEATURE_QUANTIZED_QUERY : 0;
    features |= l->batch_invariant >= 1 ? ATTN_FEATURE_BATCH_INVARIANT : 0;
    return features | l->needed_features;
}

static bool is_of(uint64_t mask, int32_t code)
{
    return mask == 0 || (code < ATTN_VENDOR_CODE && mask >> code & 1);
}

/* What a backend serves, but not together; after compositions are decided. */
static void check_combinations(struct check *check, int32_t phase)
{
    const struct attn_layer_desc *l = check->layer;
    uint64_t terms = terms_of(check->layer, check->match->composed);
    uint64_t features = features_of(check->layer);
    for (int32_t i = 0; i < check->caps->num_refused; i++) {
        const struct attn_refused_combination *refused = &check->caps->refused[i];
        const bool kv_dtypes = is_of(refused->kv_dtypes, l->kv_dtype) ||
                               is_of(refused->kv_dtypes, kv_dtype_of(l, true));
        if (kv_dtypes && is_of(refused->dtypes, l->dtype) && is_of(refused->layer_kinds, l->kind) &&
            is_of(refused->phases, phase) &&
            (refused->head_size.max == 0 || range_holds(&refused->head_size, 1, l->head_size)) &&
            (terms & refused->terms) == refused->terms &&
            (features & refused->features) == refused->features) {
            reasons_add(check->reasons, "combination", refused->why, "not together");
        }
    }
}

void match_backend(const struct attn_backend_caps *caps, const struct layer *layer, int32_t phase,
                   const int32_t *block_sizes, int32_t num_block_sizes, struct match *match,
                   struct reasons *reasons)
{
    struct check check = {caps, &layer->desc, layer, reasons, match};
    *match = (struct match){0, caps->graph_level, 0};
    hold_kind(&check);
    check_code(&check, "phase", ATTN_NAMES_PHASE, phase, caps->phases);
    check_code(&check, "dtype", ATTN_NAMES_DTYPE, layer->desc.dtype, caps->dtypes);
    hold_kernels(&check);
    check_heads(&check);
    if (!layer->has_states && !layer->is_latent) {
        check_head_size(&check);
    }
    check_block_size(&check, block_sizes, num_block_sizes);
    hold_quantization(&check);
    if (layer_has_cache(&layer->desc) && !layer->has_states) {
        hold_view_forms(&check);
    }
    if (!layer->has_states) {
        hold_terms(&check);
    }
    for (int32_t i = 0; compositions[i] != NULL; i++) {
        if (compositions[i]->match != NULL) {
            compositions[i]->match(&check, phase);
        }
    }
    check_caches(&check);
    check_lists(&check);
    hold_features(&check, phase);
    check_extensions(&check);
    check_combinations(&check, phase);
}
