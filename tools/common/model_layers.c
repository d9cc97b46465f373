/* SPDX-License-Identifier: Apache-2.0 */
/* What tools ask of layers that were read. */
#include <math.h>
#include <stdlib.h>

#include "model_config.h"
#include "support/layer.h"
#include "support/layer_io.h"

static bool same_sort(const struct model_layer *a, const struct model_layer *b)
{
    return a->tower == b->tower && a->desc.kind == b->desc.kind &&
           a->desc.has_window == b->desc.has_window && a->desc.chunk_size == b->desc.chunk_size &&
           a->lists.max_entries == b->lists.max_entries && a->desc.head_size == b->desc.head_size &&
           a->compressor.tokens_per_row == b->compressor.tokens_per_row &&
           a->cache.tokens_per_row == b->cache.tokens_per_row;
}

void model_config_link(struct model_config *config)
{
    for (int32_t i = 0; i < config->num_layers; i++) {
        struct model_layer *layer = &config->layers[i];
        struct attn_ext *lists = layer->lists.max_entries > 0 ? &layer->lists.ext : NULL;
        layer->desc.name = layer->name;
        layer->desc.next = layer->desc.kind == ATTN_LAYER_DECODER ? lists : layer->desc.next;
        if (layer->desc.kind == ATTN_LAYER_RECURRENT) {
            layer->desc.next = &layer->gdn.ext;
            layer->gdn.ext.next = layer->rule.ext.id != 0 ? &layer->rule.ext : NULL;
            if (layer->cache.role == ATTN_CACHE_REPLAY) {
                layer->caches.caches = &layer->cache;
                layer->caches.ext.next = layer->gdn.ext.next;
                layer->gdn.ext.next = &layer->caches.ext;
            }
        } else if (layer->desc.kind == ATTN_LAYER_MLA) {
            layer->desc.next = &layer->mla.ext;
            struct attn_ext *rope = config->rotates && layer->output_rope.rotary_dim > 0
                                        ? &layer->output_rope.ext
                                        : NULL;
            layer->mla.ext.next = layer->cache.tokens_per_row > 0 ? &layer->caches.ext
                                  : rope != NULL                  ? rope
                                                                  : lists;
            layer->caches.caches = &layer->cache;
            layer->caches.ext.next = &layer->compressed.ext;
            layer->compressed.ext.next = rope;
        } else if (layer->desc.kind == ATTN_LAYER_INDEXER) {
            layer->desc.next = &layer->indexer.ext;
            layer->indexer.ext.next = config->fuses_index_write && layer->index_write.ext.id != 0
                                          ? &layer->index_write.ext
                                          : NULL;
        } else if (layer->desc.kind == ATTN_LAYER_DRAFT_COMPRESSOR) {
            layer->desc.next = &layer->compressor.ext;
        }
    }
}

int32_t model_config_replay(struct model_config *config, int32_t tokens)
{
    int32_t rings = 0;
    for (int32_t i = 0; i < config->num_layers; i++) {
        struct model_layer *layer = &config->layers[i];
        if (layer->desc.kind == ATTN_LAYER_RECURRENT) {
            layer->cache =
                layer_ring(&layer->gdn, layer->desc.dtype, layer_gates(&layer->desc), tokens);
            layer->cache.tokens_per_row = 0; /* reads as 1 */
            layer->caches = EXTENSION(attn_layer_caches, ATTN_EXT_LAYER_CACHES, NULL,
                                      .num_caches = 1, .cache_stride = sizeof layer->cache);
            rings++;
        }
    }
    model_config_link(config);
    return rings;
}

int32_t model_config_drop(struct model_config *config, int32_t kind)
{
    int32_t kept = 0;
    for (int32_t i = 0; i < config->num_layers; i++) {
        if (config->layers[i].desc.kind != kind) {
            config->layers[kept++] = config->layers[i];
        }
    }
    const int32_t dropped = config->num_layers - kept;
    config->num_layers = kept;
    model_config_link(config);
    return dropped;
}

void model_config_keep(struct model_config *config, int32_t count)
{
    int32_t kept = 0, of_tower[2] = {0, 0}, sorts[2] = {0, 0};
    bool first[MAX_LAYERS];
    for (int32_t i = 0; i < config->num_layers; i++) {
        first[i] = true;
        for (int32_t j = 0; j < i; j++) {
            first[i] &= !same_sort(&config->layers[i], &config->layers[j]);
        }
        sorts[config->layers[i].tower] += first[i];
    }
    for (int32_t i = 0; i < config->num_layers; i++) {
        int32_t tower = config->layers[i].tower;
        /* Keeps room for the sorts that follow. */
        bool room = of_tower[tower] + sorts[tower] < count;
        sorts[tower] -= first[i];
        if (first[i] || room) {
            of_tower[tower]++;
            config->layers[kept++] = config->layers[i];
        }
    }
    config->num_layers = kept;
    model_config_link(config);
}

attn_status model_config_select(const struct model_config *config, const struct attn_api *api,
                                attn_runtime *runtime, const struct attn_select_options *options,
                                attn_assignment **assignment, struct attn_error *error)
{
    const struct attn_layer_desc **layers = calloc((size_t)config->num_layers + 1, sizeof *layers);
    if (layers == NULL) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    for (int32_t i = 0; i < config->num_layers; i++) {
        layers[i] = &config->layers[i].desc;
    }
    const attn_status status =
        api->select(runtime, options, layers, config->num_layers, assignment, error);
    free(layers);
    return status;
}

void model_alibi_slopes(float *slopes, int32_t num_heads)
{
    int32_t power = 1;
    while (2 * power <= num_heads) {
        power *= 2;
    }
    for (int32_t h = 0; h < num_heads; h++) {
        double exponent = h < power ? -8.0 * (h + 1) / power : -4.0 * (2 * (h - power) + 1) / power;
        slopes[h] = (float)exp2(exponent);
    }
}
