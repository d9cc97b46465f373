/* SPDX-License-Identifier: Apache-2.0 */
/* What a backend serves, but not together. */
#include "select/layer_check.h"
#include "select/match_check.h"

static uint64_t terms_of(const struct attn_layer_desc *l, uint32_t composed)
{
    uint64_t terms = l->causal ? ATTN_TERM_CAUSAL : ATTN_TERM_BIDIRECTIONAL;
    terms |= l->causal_per_request ? ATTN_TERM_CAUSAL_PER_REQUEST : 0;
    if (l->has_window) {
        terms |= !l->causal && l->window_right != 0 ? ATTN_TERM_SYMMETRIC_WINDOW
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
    features |= l->device_seq_lens_only ? ATTN_FEATURE_DEVICE_SEQ_LENS : 0;
    features |= l->q_scale_form != ATTN_SCALE_NONE ? ATTN_FEATURE_QUANTIZED_QUERY : 0;
    features |= l->batch_invariant >= 1 ? ATTN_FEATURE_BATCH_INVARIANT : 0;
    return features | l->needed_features;
}

void check_combinations(struct check *check)
{
    uint64_t terms = terms_of(check->layer, check->match->composed);
    uint64_t features = features_of(check->layer);
    for (int32_t i = 0; i < check->caps->num_refused; i++) {
        const struct attn_refused_combination *refused = &check->caps->refused[i];
        bool kv = refused->kv_dtypes == 0 || refused->kv_dtypes >> check->layer->kv_dtype & 1;
        if (kv && (terms & refused->terms) == refused->terms &&
            (features & refused->features) == refused->features) {
            reasons_add(check->reasons, "combination", refused->why, "not together");
        }
    }
}
