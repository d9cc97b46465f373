/* SPDX-License-Identifier: Apache-2.0 */
/* Layers whose cache is spread over ranks: what the two attends of such a step see of them. */
#include "bind/bound.h"

bool layer_is_spread(const attn_layer *layer)
{
    const struct attn_context_parallel *cp = layer->layer.cp;
    return cp != NULL && cp->decode != NULL && cp->decode->world_size > 1;
}

int64_t layer_tokens_per_block(const attn_layer *layer)
{
    int64_t ranks = layer_is_spread(layer) ? layer->layer.cp->decode->world_size : 1;
    return layer->layer.desc.block_size * ranks;
}

/* The context is attended by the heads of all ranks. Sinks' logits stay with the new keys: in one
 * part, on the rank that owns the heads. */
void parallel_rewrite_parts(attn_layer *layer)
{
    struct attn_layer_desc *fresh = &layer->parts[PART_NEW];
    *fresh = layer->parts[PART_MAIN];
    fresh->needs_lse = 1;
    layer->part_params[PART_NEW] = layer->part_params[PART_MAIN];
    layer->parts[PART_CONTEXT].num_q_heads *= layer->layer.cp->decode->world_size;
}
