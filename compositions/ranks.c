/* SPDX-License-Identifier: Apache-2.0 */
#include "ranks.h"

#include "step/plan.h"

int32_t ranks_count(const struct attn_collectives *ranks)
{
    return ranks != NULL ? ranks->world_size : 1;
}

bool layer_splits_queries(const attn_layer *layer)
{
    return layer->selected->cp != NULL && ranks_count(layer->selected->cp->prefill) > 1;
}

int32_t context_cache_ranks(const struct attn_context_parallel *cp)
{
    return cp != NULL && cp->decode != NULL ? ranks_count(cp->decode) * ranks_count(cp->prefill)
                                            : 1;
}

bool context_is_spread(const struct attn_context_parallel *cp)
{
    return context_cache_ranks(cp) > 1;
}

int32_t layer_cache_ranks(const attn_layer *layer)
{
    return context_cache_ranks(layer->selected->cp);
}

int32_t layer_cache_rank(const attn_layer *layer)
{
    const struct attn_context_parallel *cp = layer->selected->cp;
    return (cp->prefill != NULL ? cp->prefill->rank : 0) * ranks_count(cp->decode) +
           cp->decode->rank;
}

bool layer_is_spread(const attn_layer *layer)
{
    return context_is_spread(layer->selected->cp);
}

int32_t parallel_local_length(const attn_layer *layer, int32_t context, int32_t rank)
{
    int32_t interleave = layer->selected->cp->interleave > 0 ? layer->selected->cp->interleave : 1;
    return local_keys(context > 0 ? context : 0, rank, layer_cache_ranks(layer), interleave);
}
