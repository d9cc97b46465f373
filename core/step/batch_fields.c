/* SPDX-License-Identifier: Apache-2.0 */
/* What of a batch changes what is computed, against what the plan's layers read: the rest is
 * refused by name. Lengths and places of keys (seq_lens, encoder_seq_lens, block_table,
 * slot_mapping) are no such thing: one batch may be planned for groups of several kinds, and each
 * reads its own. */
#include "step/plan_state.h"

/* Why a batch may not override the layer's `causal`; NULL: it may. */
static const char *keeps_causal(const attn_layer *layer)
{
    const struct attn_layer_desc *l = layer->desc;
    const uint64_t term = l->causal == ATTN_CAUSAL_YES ? ATTN_TERM_BIDIRECTIONAL : ATTN_TERM_CAUSAL;
    if (l->kind == ATTN_LAYER_RECURRENT) {
        return "a recurrence is causal";
    }
    if (l->kind == ATTN_LAYER_INDEXER) {
        return "index keys are chosen from what a token has before it";
    }
    if (l->kind == ATTN_LAYER_DRAFT_COMPRESSOR) {
        return "a row is pooled of the tokens before it";
    }
    if (l->kind == ATTN_LAYER_CROSS) {
        return "positions of a cross layer's keys are not its queries'";
    }
    if (l->chunk_size > 0) {
        return "chunked local attention is causal for every request";
    }
    if (l->prefix_lm) {
        return "prefix-LM spans are islands of a causal layer";
    }
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        if (!(layer->served[phase].instance->caps->terms & term)) {
            return "its backend does not declare the term";
        }
    }
    return NULL;
}

void batch_fields_init(attn_plan *plan)
{
    struct batch_takes *takes = &plan->takes;
    takes->rows = true;
    takes->bounds = true;
    for (int32_t i = 0; i < plan->num_steps; i++) {
        const attn_layer *layer = plan->steps[i].layer;
        const struct attn_layer_desc *l = layer->desc;
        takes->kinds |= 1u << l->kind;
        takes->reads |= layer->selected->reads;
        takes->causal_per_request |= l->causal_per_request != 0;
        takes->trees |= 1u << l->tree_mask;
        takes->spans |= l->prefix_lm != 0;
        takes->logits |= l->fast_prefill != 0;
        for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
            takes->rows &=
                (layer->served[phase].instance->caps->features & ATTN_FEATURE_BLOCK_TABLE_ROW) != 0;
        }
        takes->bounds &= l->host_bounds != 0;
        if (takes->no_other[l->causal == ATTN_CAUSAL_YES] == NULL) {
            takes->no_other[l->causal == ATTN_CAUSAL_YES] = keeps_causal(layer);
        }
    }
}

static attn_status check_causal(const attn_plan *plan, const struct attn_batch *b,
                                struct attn_error *error)
{
    /* layers that are causal themselves, asked not to be, or the other way round */
    const char *why =
        b->causal == ATTN_CAUSAL_DEFAULT ? NULL : plan->takes.no_other[b->causal == ATTN_CAUSAL_NO];
    return why == NULL ? ATTN_OK
                       : BAD("causal", "causal is %d, and a layer of group %d cannot follow: %s",
                             b->causal, plan->group, why);
}

attn_status batch_check_fields(const attn_plan *plan, const struct attn_batch *b,
                               struct attn_error *error)
{
    const struct batch_takes *takes = &plan->takes;
    const bool encoder = takes->kinds >> ATTN_LAYER_ENCODER & 1;
    const bool blocks = !encoder && !(takes->kinds >> ATTN_LAYER_RECURRENT & 1);
    const bool one_tree = takes->trees >> ATTN_TREE_BITS != 3; /* not both forms */
    const struct {
        const char *field;
        bool brought, taken;
        const char *needed;
    } fields[] = {
        {"causal_per_request", b->causal_per_request != NULL, takes->causal_per_request,
         "a layer says causal_per_request"},
        {"tree", b->tree != NULL, takes->trees >> ATTN_TREE_BITS != 0 && one_tree,
         "the layers say one tree_mask, bits or bias"},
        {"spans", b->spans != NULL || b->num_spans != 0, takes->spans, "a layer says prefix_lm"},
        {"logits_indices", b->logits_indices != NULL || b->num_logits_indices != 0, takes->logits,
         "a layer says fast_prefill"},
        {"block_table_row", b->block_table_row != NULL && blocks, takes->rows,
         "every layer's backend declares the feature"},
        {"key_start_loc", b->key_start_loc != NULL, encoder, "keys are contiguous: encoders"},
        {"flags", (b->flags & ATTN_BATCH_HOST_BOUNDS) != 0, takes->bounds,
         "every layer says host_bounds (HOST_BOUNDS)"},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        BAD_IF(fields[i].brought && !fields[i].taken, fields[i].field,
               "the batch brings %s; for group %d it does where %s", fields[i].field, plan->group,
               fields[i].needed);
    }
    BAD_IF(b->tree != NULL && (b->tree_stride_request < 0 || b->tree_stride_row < 0), "tree",
           "trees lie %lld words apart, their rows %lld; 0 or above",
           (long long)b->tree_stride_request, (long long)b->tree_stride_row);
    BAD_IF(b->num_spans < 0 || (b->num_spans > 0 && b->spans == NULL) ||
               (b->spans != NULL && b->span_start_loc == NULL),
           "spans", "%d spans at %p, span_start_loc %p; both are needed", b->num_spans,
           (const void *)b->spans, (const void *)b->span_start_loc);
    BAD_IF(b->num_logits_indices < 0 || (b->num_logits_indices > 0 && b->logits_indices == NULL),
           "logits_indices", "%d rows at %p", b->num_logits_indices,
           (const void *)b->logits_indices);
    TRY(ext_check_readers(b->next, ABI_BATCH, takes->reads, NULL, error));
    return check_causal(plan, b, error);
}
