/* SPDX-License-Identifier: Apache-2.0 */
/* All caches of a layer: those of its kind, then those of attn_layer_caches. */
#include "bind/bound.h"

#include <stdio.h>
#include <string.h>

#include "select/layer.h"

/* K or V, latent rows, index keys, or a state or the window of its convolution, of one slot. */
static struct cache own_cache(attn_layer *layer, bool second)
{
    const struct attn_layer_desc *l = layer->desc;
    const struct attn_recurrent_desc *g = layer->selected->gdn;
    struct cache cache = {layer->spec, layer_row(l, second),
                          second ? &layer->v_cache : &layer->k_cache};
    struct attn_cache_spec *spec = &cache.spec;
    const char *name = second ? "v" : "k";
    if (g != NULL) {
        name = second ? "the window" : "the state";
        spec->role = second ? ATTN_CACHE_CONV : ATTN_CACHE_STATE;
        spec->kv_dtype = second ? l->dtype : g->state_dtype; /* one code for one thing */
        spec->num_heads =
            second ? 2 * g->num_k_heads * g->head_size_k + g->num_v_heads * g->head_size_v
                   : g->num_v_heads;
        spec->head_size = second ? g->conv_width - 1 + g->num_speculative_tokens
                                 : g->head_size_k * g->head_size_v;
        spec->tokens_per_row = 1;
        cache.row = kv_row(spec->kv_dtype, spec->head_size, false);
    } else if (second) {
        spec->role = ATTN_CACHE_V;
        spec->kv_dtype = kv_dtype_of(l, true);
        spec->head_size = l->head_size_v;
    }
    spec->page_bytes_alone =
        layer_has_vendor_pages(layer)
            ? spec->page_bytes /* both of them */
            : (int64_t)spec->block_size * spec->num_heads * (cache.row.bytes + cache.row.apart);
    snprintf(cache.name, sizeof cache.name, "%s", name);
    return cache;
}

static struct cache further_cache(attn_layer *layer, int32_t index)
{
    const struct attn_cache_desc *c = &layer->selected->caches->caches[index];
    const int32_t rows = cache_block_size(c, layer->spec.block_size);
    struct cache cache = {.row = kv_row(c->kv_dtype, c->head_size, false),
                          .view = &layer->further[index]};
    cache.spec = layer->spec;
    struct attn_cache_spec *spec = &cache.spec;
    spec->role = c->role;
    spec->of = c->of;
    spec->table = c->table;
    spec->kv_dtype = c->kv_dtype;
    spec->num_heads = c->num_heads;
    spec->head_size = c->head_size;
    spec->block_size = rows;
    spec->kernel_block_size = rows / layer_parts(layer, c->table);
    spec->tokens_per_row = c->tokens_per_row;
    spec->ndim = 0;
    memset(spec->shape, 0, sizeof spec->shape);
    memset(spec->stride_order, 0, sizeof spec->stride_order);
    spec->page_bytes = spec->padded_page_bytes = spec->page_bytes_alone =
        (int64_t)rows * c->num_heads * (cache.row.bytes + cache.row.apart);
    snprintf(cache.name, sizeof cache.name, "cache %d", layer->num_own + index);
    return cache;
}

attn_status layer_make_caches(attn_layer *layer, struct attn_error *error)
{
    const struct attn_layer_caches *described = layer->selected->caches;
    struct arena *arena = &layer->model->arena;
    if (layer->spec.kind != ATTN_KV_SPEC_NONE) {
        const bool one = layer->selected->gdn != NULL ? layer->selected->gdn->conv_width == 0
                                                      : layer->selected->is_latent;
        layer->num_own = one ? 1 : 2;
        layer->num_further = described != NULL ? described->num_caches : 0;
    }
    const size_t further = (size_t)layer->num_further;
    layer->all = arena_array(arena, (size_t)layer->num_own + further, sizeof *layer->all);
    layer->further = arena_array(arena, further, sizeof *layer->further);
    layer->caches = arena_array(arena, further, sizeof *layer->caches);
    NO_MEMORY_IF(arena->failed, "model", "layer '%s'", layer->desc->name);
    for (int32_t i = 0; i < layer->num_own; i++) {
        layer->all[i] = own_cache(layer, i == 1);
    }
    for (int32_t i = 0; i < layer->num_further; i++) {
        const struct attn_cache_desc *c = &described->caches[i];
        layer->all[layer->num_own + i] = further_cache(layer, i);
        layer->caches[i] = (struct attn_layer_cache){c->role, c->of, c->table, c->tokens_per_row,
                                                     &layer->further[i]};
    }
    return ATTN_OK;
}

int32_t layer_num_caches(const attn_layer *layer)
{
    return layer != NULL ? layer->num_own + layer->num_further : 0;
}

static attn_status check_index(const attn_layer *layer, int32_t index, struct attn_error *error)
{
    ERROR_IF(index < 0 || index >= layer_num_caches(layer), ATTN_ERROR_NOT_FOUND, "index",
             "layer %p has %d caches; %d is none", (const void *)layer, layer_num_caches(layer),
             index);
    return ATTN_OK;
}

attn_status layer_cache_spec(const attn_layer *layer, int32_t index, struct attn_cache_spec *spec,
                             struct attn_error *error)
{
    TRY(check_index(layer, index, error));
    return struct_give(spec, &layer->all[index].spec, ABI_CACHE_SPEC, error);
}

attn_status layer_cache_view(const attn_layer *layer, int32_t index, struct attn_kv_view *view,
                             struct attn_error *error)
{
    TRY(check_index(layer, index, error));
    const struct attn_kv_view *bound = layer->all[index].view;
    ERROR_IF(bound->data == NULL, ATTN_ERROR_ORDER, "layer_bind_caches",
             "layer '%s' has no cache bound", layer->desc->name);
    return struct_give(view, bound, ABI_KV_VIEW, error);
}

/* States lie head after head, and the convolution's window next to them. */
static attn_status check_states(const attn_layer *layer, struct attn_kv_view *read,
                                struct attn_error *error)
{
    const struct cache *state = &layer->all[0];
    const int64_t element = kv_row(layer->desc->dtype, 1, false).bytes;
    const int64_t of_state = kv_row(state->spec.kv_dtype, 1, false).bytes;
    const bool window = layer->num_own == 2;
    const bool apart =
        window && (read[1].stride_block % element != 0 || read[1].stride_head % element != 0 ||
                   read[0].num_blocks != read[1].num_blocks);
    BAD_IF(read[0].stride_head != state->row.bytes || read[0].stride_block % of_state != 0 || apart,
           "stride_head",
           "layer '%s': states lie head after head in whole elements, with as many slots as "
           "windows",
           layer->desc->name);
    for (int32_t i = layer->num_own; i < layer_num_caches(layer); i++) { /* a ring */
        BAD_IF(read[i].num_blocks != read[0].num_blocks, "num_blocks",
               "layer '%s': %s has %lld slots; %lld, as the state", layer->desc->name,
               layer->all[i].name, (long long)read[i].num_blocks, (long long)read[0].num_blocks);
    }
    read[0].stride_slot = read[0].stride_head * read[0].num_heads;
    if (window) {
        read[1].stride_slot = read[1].stride_block;
    }
    return ATTN_OK;
}

attn_status layer_bind_caches(attn_layer *layer, const struct attn_kv_view *const *views,
                              int32_t num_views, struct attn_error *error)
{
    struct attn_kv_view read[2 + ATTN_MAX_CACHES] = {{0}};
    BAD_IF(layer == NULL || views == NULL || num_views != layer_num_caches(layer) || num_views == 0,
           "num_views", "layer %p, %d views at %p; the layer has %d caches", (void *)layer,
           num_views, (const void *)views, layer_num_caches(layer));
    for (int32_t i = 0; i < num_views; i++) {
        TRY(cache_read_view(layer, &layer->all[i], views[i], &read[i], error));
    }
    if (layer->selected->has_states) {
        TRY(check_states(layer, read, error));
    } else if (layer->num_own == 2) {
        TRY(cache_check_pair(layer, read, error));
    }
    TRY(layer_check_unplanned(layer, "layer_bind_caches", error));
    layer_release_readers(layer);
    for (int32_t i = 0; i < num_views; i++) {
        *layer->all[i].view = read[i];
    }
    return ATTN_OK;
}

static attn_status check_memory(const attn_layer *layer, const struct attn_cache_memory *memory,
                                struct attn_error *error)
{
    BAD_IF(memory->num_further != layer->num_further ||
               (memory->num_further > 0 &&
                (memory->further == NULL || memory->further_num_blocks == NULL)),
           "further",
           "layer '%s': %d addresses at %p, numbers of blocks at %p; it has %d caches beyond those "
           "of its kind",
           layer->desc->name, memory->num_further, (const void *)memory->further,
           (const void *)memory->further_num_blocks, layer->num_further);
    for (int32_t i = 0; i < memory->num_further; i++) {
        const struct cache *cache = &layer->all[layer->num_own + i];
        const int64_t most = MAX_CACHE / cache->spec.page_bytes;
        BAD_IF(memory->further_num_blocks[i] < 1 || memory->further_num_blocks[i] > most,
               "further_num_blocks", "layer '%s': %s of %lld blocks; 1 to %lld", layer->desc->name,
               cache->name, (long long)memory->further_num_blocks[i], (long long)most);
    }
    return ATTN_OK;
}

/* The view of compact rows [block, slot, head], blocks so many bytes apart. */
static struct attn_kv_view rows_view(const struct cache *cache, void *data, int64_t num_blocks,
                                     int64_t stride, struct attn_device device)
{
    const struct attn_cache_spec *spec = &cache->spec;
    return (struct attn_kv_view){.struct_size = sizeof(struct attn_kv_view),
                                 .data = data,
                                 .num_blocks = num_blocks,
                                 .block_size = spec->kernel_block_size,
                                 .num_heads = spec->num_heads,
                                 .head_size = spec->head_size,
                                 .stride_block = stride,
                                 .stride_slot = cache->row.bytes * spec->num_heads,
                                 .stride_head = cache->row.bytes,
                                 .device = device};
}

/* Pages of states: each with its window after it. */
static attn_status state_views(const attn_layer *layer, const struct attn_cache_memory *memory,
                               struct attn_kv_view views[2], struct attn_error *error)
{
    uint8_t *at = memory->base;
    BAD_IF(memory->base == NULL || memory->num_blocks < 1, "base",
           "layer '%s': %lld slots at %p; an address and at least 1", layer->desc->name,
           (long long)memory->num_blocks, memory->base);
    for (int32_t i = 0; i < layer->num_own; i++) {
        const struct cache *cache = &layer->all[i];
        views[i] =
            rows_view(cache, at, memory->num_blocks, cache->spec.padded_page_bytes, memory->device);
        at += views[i].stride_slot;
    }
    return ATTN_OK;
}

attn_status layer_bind_memory(attn_layer *layer, const struct attn_cache_memory *memory,
                              struct attn_error *error)
{
    struct attn_cache_memory read;
    struct attn_kv_view views[2 + ATTN_MAX_CACHES];
    const struct attn_kv_view *list[2 + ATTN_MAX_CACHES];
    const int32_t own = layer != NULL ? layer->num_own : 0, count = layer_num_caches(layer);
    BAD_IF(count == 0, "layer", "layer %p has no cache of its own", (void *)layer);
    TRY(struct_read(&read, ABI_CACHE_MEMORY, memory, error));
    TRY(check_memory(layer, &read, error));
    TRY(layer->selected->has_states ? state_views(layer, &read, views, error)
                                    : layer_kv_views(layer, read.base, read.num_blocks, &views[0],
                                                     own == 2 ? &views[1] : NULL, error));
    for (int32_t i = 0; i < own && read.device.type != 0; i++) {
        views[i].device = read.device;
    }
    for (int32_t i = own; i < count; i++) {
        const struct cache *cache = &layer->all[i];
        const int32_t parts = layer_parts(layer, cache->spec.table);
        views[i] = rows_view(cache, read.further[i - own], read.further_num_blocks[i - own] * parts,
                             cache->spec.page_bytes / parts, read.device);
        view_set_scales(&views[i], &cache->row,
                        (uint8_t *)views[i].data + views[i].block_size * views[i].stride_slot,
                        views[i].stride_block);
    }
    for (int32_t i = 0; i < count; i++) {
        list[i] = &views[i];
    }
    return layer_bind_caches(layer, list, count, error);
}
