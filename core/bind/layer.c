/* SPDX-License-Identifier: Apache-2.0 */
/* What a bound layer is to the rooms above: its parts as kernels see them, and what kernels have
 * prepared of them. */
#include "bind/bound.h"

/* The terms that a part leaves to the others. Whatever PART_MAIN keeps is the union over the
 * phases: a composed step is composed in both or the layer keeps its term and kernels of the other
 * phase read it. */
attn_status layer_make_parts(attn_layer *layer, struct attn_error *error)
{
    static const struct attn_layer_params none = {.struct_size = sizeof none};
    const struct attn_layer_desc *l = layer->desc;
    for (int32_t part = 0; part < PART_COUNT; part++) {
        layer->parts[part] = *l;
        layer->part_params[part] = layer->params != NULL ? layer->params->params : none;
    }
    for (int32_t part = PART_MAIN + 1; part < PART_COUNT; part++) {
        struct attn_layer_desc *desc = &layer->parts[part];
        layer->part_params[part].sinks = NULL;
        layer->part_params[part].sink_k = layer->part_params[part].sink_v = NULL;
        desc->kind = ATTN_LAYER_DECODER;
        desc->output_form = ATTN_OUTPUT_PLAIN;
        desc->has_sinks = 0;
        desc->sink_len = 0;
        desc->causal = ATTN_CAUSAL_NO;
        desc->causal_per_request = 0;
        desc->prefix_lm = desc->tree_mask = 0;
        desc->chunk_size = desc->chunk_lookback = 0;
        desc->has_window = 0;
        desc->window_left = desc->window_right = -1;
        desc->needs_lse = 1;
    }
    layer->tokens_per_block = l->block_size;
    layer->needed_params =
        l->has_sinks || l->alibi || l->sink_len > 0 ? "sinks, ALiBi or a static sink"
        : layer_needs_quant_params(l) ? "a cache with scales of channels or rotated rows"
                                      : NULL;
    FOR_COMPOSED(c, layer->composed_by) {
        TRY_IF((*c)->bind != NULL, (*c)->bind(layer, error));
    }
    return ATTN_OK;
}

attn_status layer_prepare(attn_layer *layer, int32_t part, const struct attn_attend_args *call,
                          struct attn_error *error)
{
    const int32_t phase = call->phase;
    struct served *served = &layer->served[phase];
    const struct attn_kernels *kernels = &served->instance->kernels;
    attn_status status = ATTN_OK;
    ERROR_IF(!lock_take(&layer->model->lock), ATTN_ERROR_ORDER, "log",
             "called while this thread prepares a layer of the same model, as from its log: layer "
             "'%s' cannot be prepared there",
             layer->desc->name);
    if (!served->is_prepared[part] && kernels->prepare != NULL) {
        struct attn_error why = ATTN_ERROR_INIT;
        const struct attn_prepare_args args =
            ABI_ARGS(.instance = call->instance, .layer = call->layer, .params = call->params,
                     .k_cache = call->k_cache, .v_cache = call->v_cache, .caches = call->caches,
                     .num_caches = call->num_caches, .cache_stride = call->cache_stride,
                     .phase = phase);
        status = error_relay(error, kernels->prepare(&args, &served->prepared[part], &why), &why);
    }
    served->is_prepared[part] = status == ATTN_OK;
    lock_give(&layer->model->lock);
    return status;
}

void layer_release_states(attn_layer *layer)
{
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        struct served *served = &layer->served[phase];
        for (int32_t part = 0; part < PART_COUNT; part++) {
            if (served->prepared[part] != NULL) {
                served->instance->kernels.release(served->instance->handle, served->prepared[part]);
            }
            served->prepared[part] = NULL;
            served->is_prepared[part] = false;
        }
    }
}

void layer_release_readers(attn_layer *owner)
{
    for (int32_t i = 0; i < owner->model->num_layers; i++) {
        if (owner->model->layers[i].owner == owner) {
            layer_release_states(&owner->model->layers[i]);
        }
    }
}

int64_t layer_num_blocks(const attn_layer *layer, int32_t table)
{
    int64_t blocks = table == 0 ? layer->k_cache.num_blocks : INT64_MAX;
    for (int32_t i = 0; i < layer->num_further; i++) {
        const bool fewer = layer->caches[i].table == table && layer->further[i].num_blocks < blocks;
        blocks = fewer ? layer->further[i].num_blocks : blocks;
    }
    return blocks;
}
