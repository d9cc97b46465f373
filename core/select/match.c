/* SPDX-License-Identifier: Apache-2.0 */
#include "select/match.h"

#include <stdio.h>

#include "select/composition.h"
#include "select/layer.h"
#include "select/names.h"

/* A kind is served because it is declared, or because the core can compose it of parts that are. */
static void check_kind(struct check *check)
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

/* The layer's terms. With `tell` those that the backend lacks become reasons; of the last two
 * compositions say it. */
static uint64_t terms_of(const struct check *check, bool tell)
{
    const struct attn_layer_desc *l = check->layer;
    const uint32_t composed = check->match->composed;
    const bool causal = l->causal == ATTN_CAUSAL_YES, symmetric = !causal && l->window_right != 0;
    uint64_t terms = 0;
    char window[64], soft_cap[64];
    snprintf(window, sizeof window, "(%d, %d)", l->window_left, l->window_right);
    snprintf(soft_cap, sizeof soft_cap, "%g", (double)l->soft_cap);
    const struct {
        uint64_t term;
        bool has;
        const char *field, *asked;
    } rows[] = {
        {ATTN_TERM_CAUSAL, causal, "causal", "yes"},
        {ATTN_TERM_BIDIRECTIONAL, !causal, "causal", "no (bidirectional)"},
        {ATTN_TERM_CAUSAL_PER_REQUEST, l->causal_per_request, "causal_per_request", "yes"},
        {ATTN_TERM_SYMMETRIC_WINDOW, l->has_window && symmetric, "symmetric_window", window},
        {ATTN_TERM_SLIDING_WINDOW, l->has_window && !symmetric, "sliding_window", window},
        {ATTN_TERM_SOFT_CAP, l->soft_cap > 0, "soft_cap", soft_cap},
        {ATTN_TERM_ALIBI, l->alibi == ATTN_ALIBI_LINEAR, "alibi", "linear"},
        {ATTN_TERM_ALIBI_SQRT, l->alibi == ATTN_ALIBI_SQRT, "alibi_sqrt", "yes"},
        {ATTN_TERM_SINKS, l->has_sinks, "sinks", "yes"},
        {ATTN_TERM_PREFIX_LM, l->prefix_lm, "prefix_lm", "yes"},
        {ATTN_TERM_TREE_BITS, l->tree_mask == ATTN_TREE_BITS, "tree_mask", "bits"},
        {ATTN_TERM_TREE_BIAS, l->tree_mask == ATTN_TREE_BIAS, "tree_mask", "bias"},
        {ATTN_TERM_CHUNKED_LOCAL, l->chunk_size > 0 && !(composed & ATTN_COMPOSE_CHUNKED)},
        {ATTN_TERM_STATIC_SINK, l->sink_len > 0 && !(composed & ATTN_COMPOSE_STATIC_SINK)},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        terms |= rows[i].has ? rows[i].term : 0;
        if (tell && rows[i].has && rows[i].field != NULL && !(check->caps->terms & rows[i].term)) {
            reasons_add(check->reasons, rows[i].field, rows[i].asked, "no");
        }
    }
    return terms;
}

static void check_kernels(struct check *check)
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
static void check_view_forms(struct check *check)
{
    for (int32_t i = 0; i < NUM_VIEW_FORMS; i++) {
        if (check->layer->needed_view_forms >> i & 1) {
            check_code(check, "needed_view_forms", ATTN_NAMES_VIEW_FORM, i,
                       check->caps->view_forms);
        }
    }
}

static void check_quantization(struct check *check)
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
        for (int32_t is_v = 0; is_v < 2; is_v++) {
            const int32_t dtype = kv_dtype_of(l, is_v);
            const int32_t form = is_v ? l->v_scale_form : l->k_scale_form;
            if (kv_is_fp8(dtype) || (kv_is_opaque(dtype) && form != ATTN_SCALE_NONE)) {
                check_code(check, is_v ? "v_scale_form" : "k_scale_form", ATTN_NAMES_SCALE_FORM,
                           form, is_v ? caps->v_scale_forms : caps->k_scale_forms);
            }
        }
    }
    if (l->p_scale_form != ATTN_SCALE_NONE) {
        check_code(check, "p_scale_form", ATTN_NAMES_SCALE_FORM, l->p_scale_form,
                   caps->p_scale_forms);
    }
    if (l->q_scale_form != ATTN_SCALE_NONE) {
        check_need_feature(check, true, ATTN_FEATURE_QUANTIZED_QUERY, "q_scale_form",
                           name_of(ATTN_NAMES_SCALE_FORM, l->q_scale_form));
        check_code(check, "q_dtype", ATTN_NAMES_DTYPE, l->q_dtype, caps->q_dtypes);
    }
}

/* The features that the layer takes. With `tell` those that the backend lacks become reasons, but
 * for the first three, of which check_kernels and check_quantization say it. */
static uint64_t features_of(const struct check *check, bool tell)
{
    const struct attn_layer_desc *l = check->layer;
    uint64_t features = 0;
    const struct {
        uint64_t feature;
        bool wanted;
        const char *field, *asked;
    } rows[] = {
        {ATTN_FEATURE_PAGED_KV, layer_has_cache(l)},
        {ATTN_FEATURE_CONTIGUOUS_KV, !layer_has_cache(l)},
        {ATTN_FEATURE_QUANTIZED_QUERY, l->q_scale_form != ATTN_SCALE_NONE},
        {ATTN_FEATURE_LSE, l->needs_lse, "lse", "yes"},
        {ATTN_FEATURE_BLOCK_TABLE_ROW, l->needs_block_table_row, "block_table_row", "yes"},
        {ATTN_FEATURE_DEVICE_SEQ_LENS, l->device_seq_lens_only, "device_seq_lens_only", "yes"},
        {ATTN_FEATURE_HOST_BOUNDS, l->host_bounds, "host_bounds", "yes"},
        {ATTN_FEATURE_FAST_PREFILL, l->fast_prefill, "fast_prefill", "yes"},
        {ATTN_FEATURE_FUSED_ROPE, l->rope != 0, "rope", "yes"},
        {ATTN_FEATURE_FUSED_ROPE_NORM, l->qk_norm != 0, "qk_norm", "yes"},
        {ATTN_FEATURE_BATCH_INVARIANT, l->batch_invariant >= 1, "batch_invariant", "yes"},
        {ATTN_FEATURE_BATCH_INVARIANT_PREFIX, l->batch_invariant >= 2, "batch_invariant",
         "with prefix caching"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        features |= rows[i].wanted ? rows[i].feature : 0;
        check_need_feature(check, tell && rows[i].wanted && rows[i].field != NULL, rows[i].feature,
                           rows[i].field, rows[i].asked);
    }
    return features | l->needed_features;
}

static void check_features(struct check *check, int32_t phase)
{
    const struct attn_layer_desc *l = check->layer;
    const struct attn_backend_caps *caps = check->caps;
    if (l->needs_page_lists && caps->device.type != ATTN_DEVICE_CPU) {
        check_need_kernel(check, ATTN_KERNEL_MAKE_BLOCK_TABLE, "");
    }
    (void)features_of(check, true);
    uint64_t missing = l->needed_features & ~caps->features;
    for (int32_t i = 0; i < NUM_FEATURES; i++) {
        if (missing >> i & 1) {
            check_refuse_number(check, "needed_features", i, "bits of the backend's features");
        }
    }
    /* Levels below ALWAYS concern decode only. */
    if (l->graph_level > check->match->graph_level &&
        (phase == ATTN_PHASE_DECODE || l->graph_level == ATTN_GRAPH_ALWAYS)) {
        reasons_add(check->reasons, "graph_level", name_of_graph_level(l->graph_level),
                    name_of_graph_level(check->match->graph_level));
    }
    int32_t n = l->num_speculative_tokens * (l->parallel_drafting ? 2 : 1);
    const bool captured = l->graph_level > ATTN_GRAPH_NEVER && l->graph_level < ATTN_GRAPH_ALWAYS;
    if (phase == ATTN_PHASE_DECODE) {
        CHECK_LIMITS(
            check,
            {"graph_max_query_len", 1 + n, captured ? MOST(caps->graph_max_query_len) : INT32_MAX},
            {"num_speculative_tokens", n, MOST(caps->max_speculative_tokens)});
    }
}

static bool is_of(uint64_t mask, int32_t code)
{
    return mask == 0 || (code < ATTN_VENDOR_CODE && mask >> code & 1);
}

/* What a backend serves, but not together; after compositions are decided. */
static void check_combinations(struct check *check, int32_t phase)
{
    const struct attn_layer_desc *l = check->layer;
    uint64_t terms = terms_of(check, false), features = features_of(check, false);
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
    check_kind(&check);
    check_code(&check, "phase", ATTN_NAMES_PHASE, phase, caps->phases);
    check_code(&check, "dtype", ATTN_NAMES_DTYPE, layer->desc.dtype, caps->dtypes);
    check_kernels(&check);
    check_heads(&check);
    if (!layer->has_states && !layer->is_latent) {
        check_head_size(&check);
    }
    check_block_size(&check, block_sizes, num_block_sizes);
    check_quantization(&check);
    if (layer_has_cache(&layer->desc) && !layer->has_states) {
        check_view_forms(&check);
    }
    if (!layer->has_states) {
        (void)terms_of(&check, true);
    }
    FOR_COMPOSED(c, layer->read_by) {
        if ((*c)->match != NULL) {
            (*c)->match(&check, phase);
        }
    }
    check_caches(&check);
    check_features(&check, phase);
    check_extensions(&check);
    check_combinations(&check, phase);
}
