/* SPDX-License-Identifier: Apache-2.0 */
/* What tools ask of layers that were read. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "command.h"
#include "model_config.h"
#include "support/layer.h"
#include "support/layer_io.h"

static bool same_but_cache(const struct model_layer *a, const struct model_layer *b)
{
    return a->tower == b->tower && a->desc.kind == b->desc.kind &&
           a->desc.has_window == b->desc.has_window && a->desc.chunk_size == b->desc.chunk_size &&
           a->lists.max_entries == b->lists.max_entries && a->desc.head_size == b->desc.head_size &&
           a->compressor.tokens_per_row == b->compressor.tokens_per_row &&
           a->cache.tokens_per_row == b->cache.tokens_per_row;
}

static bool same_sort(const struct model_layer *a, const struct model_layer *b)
{
    return a->shares_cache == b->shares_cache && same_but_cache(a, b);
}

const struct model_layer *model_cache_owner(const struct model_config *config, int32_t index)
{
    const struct model_layer *layer = &config->layers[index];
    while (index-- > 0) {
        const struct model_layer *other = &config->layers[index];
        if (!other->shares_cache && same_but_cache(other, layer)) {
            return other;
        }
    }
    return NULL;
}

void model_layer_link(struct model_layer *layer, bool rotates, bool fuses_index_write)
{
    const bool recurrent = layer->desc.kind == ATTN_LAYER_RECURRENT;
    struct attn_ext *lists = layer->lists.max_entries > 0 ? &layer->lists.ext : NULL;
    struct attn_ext *rope =
        rotates && layer->output_rope.rotary_dim > 0 ? &layer->output_rope.ext : NULL;
    struct attn_ext *rule = layer->rule.ext.id != 0 ? &layer->rule.ext : NULL;
    if (layer->rounding.ext.id != 0) {
        layer->rounding.ext.next = rule;
        rule = &layer->rounding.ext;
    }
    struct attn_ext *caches = layer->cache.num_heads > 0 ? &layer->caches.ext : NULL;
    const bool changes_keys = fuses_index_write && layer->index_write.ext.id != 0;
    layer->desc.name = layer->name;
    layer->indexer.ext.next = changes_keys ? &layer->index_write.ext : NULL;
    layer->caches = layer_caches(&layer->cache, 1, recurrent ? rule : &layer->compressed.ext);
    layer->compressed.ext.next = rope;
    layer->gdn.ext.next = caches != NULL ? caches : rule;
    layer->mla.ext.next = caches != NULL ? caches : rope != NULL ? rope : lists;
    layer->desc.next = recurrent                                         ? &layer->gdn.ext
                       : layer->desc.kind == ATTN_LAYER_MLA              ? &layer->mla.ext
                       : layer->desc.kind == ATTN_LAYER_INDEXER          ? &layer->indexer.ext
                       : layer->desc.kind == ATTN_LAYER_DRAFT_COMPRESSOR ? &layer->compressor.ext
                                                                         : lists;
}

void model_config_link(struct model_config *config)
{
    for (int32_t i = 0; i < config->num_layers; i++) {
        struct model_layer *layer = &config->layers[i];
        model_layer_link(layer, config->rotates, config->fuses_index_write);
        layer->desc.kv_sharing_target =
            layer->shares_cache ? model_cache_owner(config, i)->name : NULL;
    }
}

void model_layer_compress(struct model_layer *layer, int32_t size, int32_t topk, int32_t ratio,
                          int32_t block_size)
{
    struct layer_compressed made;
    layer_set_compressed(&layer->desc, &layer->mla, &made, size, topk, ratio, block_size);
    if (ratio > 0) {
        layer->cache = made.cache;
        layer->compressed = made.rows;
    }
}

void model_layer_replay(struct model_layer *layer, int32_t tokens)
{
    model_layer_link(layer, false, false); /* the rule says how many gates there are */
    layer->cache = layer_ring(&layer->gdn, layer->desc.dtype, layer_gates(&layer->desc), tokens);
    layer->cache.tokens_per_row = 0; /* reads as 1 */
    model_layer_link(layer, false, false);
}

int32_t model_config_replay(struct model_config *config, int32_t tokens)
{
    int32_t rings = 0;
    for (int32_t i = 0; i < config->num_layers; i++) {
        if (config->layers[i].desc.kind == ATTN_LAYER_RECURRENT) {
            model_layer_replay(&config->layers[i], tokens);
            rings++;
        }
    }
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
    const struct attn_layer_desc **layers =
        command_calloc((size_t)config->num_layers, sizeof *layers);
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

void model_config_finish(struct model_config *config)
{
    free(config->layers);
    *config = (struct model_config){.layers = NULL};
}

void model_config_warn(const struct model_config *config, const char *tool, const char *file)
{
    if (config->guessed) {
        fprintf(
            stderr,
            "%s: %s: model_type '%s' is not known; its layers are read as plain causal decoders\n",
            tool, file, config->model_type);
    }
}

#if !ATTN_HAS_CJSON
attn_status model_config_read(struct model_config *config, const char *file,
                              struct attn_error *error)
{
    *config = (struct model_config){.layers = NULL};
    return command_error(error, ATTN_ERROR_UNSUPPORTED, "configuration",
                         "built without libcjson, which reads configurations");
}
#endif
