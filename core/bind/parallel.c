/* SPDX-License-Identifier: Apache-2.0 */
/* Layers whose cache is spread over ranks: what the two attends of such a step see of them. */
#include "bind/bound.h"

static int32_t world(const struct attn_collectives *ranks)
{
    return ranks != NULL ? ranks->world_size : 1;
}

bool layer_splits_queries(const attn_layer *layer)
{
    return layer->selected->cp != NULL && world(layer->selected->cp->prefill) > 1;
}

int32_t layer_cache_ranks(const attn_layer *layer)
{
    const struct attn_context_parallel *cp = layer->selected->cp;
    return cp != NULL && cp->decode != NULL ? world(cp->decode) * world(cp->prefill) : 1;
}

int32_t layer_cache_rank(const attn_layer *layer)
{
    const struct attn_context_parallel *cp = layer->selected->cp;
    return (cp->prefill != NULL ? cp->prefill->rank : 0) * world(cp->decode) + cp->decode->rank;
}

bool layer_is_spread(const attn_layer *layer)
{
    return layer_cache_ranks(layer) > 1;
}

int64_t layer_tokens_per_block(const attn_layer *layer)
{
    return layer->desc->block_size * (int64_t)layer_cache_ranks(layer);
}

bool layer_same_ranks(const attn_layer *a, const attn_layer *b)
{
    static const struct attn_context_parallel none;
    const struct attn_context_parallel *x = a->selected->cp != NULL ? a->selected->cp : &none;
    const struct attn_context_parallel *y = b->selected->cp != NULL ? b->selected->cp : &none;
    return x->decode == y->decode && x->prefill == y->prefill && x->interleave == y->interleave &&
           x->order == y->order;
}

/* The context is attended by the heads of all ranks. Sinks' logits stay with the new keys: in one
 * part, on the rank that owns the heads. */
void parallel_rewrite_parts(attn_layer *layer)
{
    struct attn_layer_desc *fresh = &layer->parts[PART_NEW];
    *fresh = layer->parts[PART_MAIN];
    fresh->needs_lse = 1;
    layer->part_params[PART_NEW] = layer->part_params[PART_MAIN];
    layer->parts[PART_CONTEXT].num_q_heads *= layer->selected->cp->decode->world_size;
}
