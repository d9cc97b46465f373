/* SPDX-License-Identifier: Apache-2.0 */
/* All caches of a layer, those beyond its kind's included. */
#include "bind/bound.h"

#include <stdio.h>
#include <string.h>

#include "bind/model.h"
#include "bind/address_check.h"
#include "select/layer.h"
#include "util/structs.h"
#include "util/counts.h"

attn_status layer_make_caches(attn_layer *layer, struct attn_error *error)
{
    const struct attn_layer_caches *described = layer->selected->caches;
    if (described == NULL) {
        return ATTN_OK;
    }
    const size_t count = (size_t)described->num_caches;
    layer->further = arena_array(&layer->model->arena, count, sizeof *layer->further);
    layer->caches = arena_array(&layer->model->arena, count, sizeof *layer->caches);
    if (layer->further == NULL || layer->caches == NULL) {
        return NO_MEMORY("model", "layer '%s'", layer->desc->name);
    }
    for (int32_t i = 0; i < described->num_caches; i++) {
        const struct attn_cache_desc *c = &described->caches[i];
        layer->caches[i] = (struct attn_layer_cache){c->role, c->of, c->table, c->tokens_per_row,
                                                     &layer->further[i]};
    }
    layer->num_further = described->num_caches;
    layer->num_tables = layer_num_tables(layer->selected);
    return ATTN_OK;
}

/* The caches of the layer's kind: K and V, latent rows, index keys, or a state with or without a
 * window. */
static int32_t num_own(const attn_layer *layer)
{
    if (layer->spec.kind == ATTN_KV_SPEC_NONE) {
        return 0;
    }
    if (layer->selected->has_states) {
        return layer->selected->gdn->conv_width > 0 ? 2 : 1;
    }
    return layer->spec.layout == ATTN_KV_LAYOUT_LATENT ? 1 : 2;
}

int32_t layer_num_caches(const attn_layer *layer)
{
    return layer != NULL ? num_own(layer) + layer->num_further : 0;
}

/* A state, or the window of its convolution, of one slot. */
static void describe_state(const attn_layer *layer, bool window, struct attn_cache_spec *spec)
{
    const struct attn_recurrent_desc *g = layer->selected->gdn;
    spec->role = window ? ATTN_CACHE_CONV : ATTN_CACHE_STATE;
    spec->kv_dtype = window ? layer->desc->dtype : g->state_dtype; /* one code for one thing */
    spec->num_heads = window ? 2 * g->num_k_heads * g->head_size_k + g->num_v_heads * g->head_size_v
                             : g->num_v_heads;
    spec->head_size =
        window ? g->conv_width - 1 + g->num_speculative_tokens : g->head_size_k * g->head_size_v;
    spec->tokens_per_row = 1;
}

static void describe_further(const attn_layer *layer, int32_t index, struct attn_cache_spec *spec)
{
    const struct attn_cache_desc *c = &layer->selected->caches->caches[index];
    spec->role = c->role;
    spec->of = c->of;
    spec->table = c->table;
    spec->kv_dtype = c->kv_dtype;
    spec->num_heads = c->num_heads;
    spec->head_size = c->head_size;
    spec->block_size = cache_block_size(c, layer->spec.block_size);
    spec->kernel_block_size = spec->block_size / layer_parts(layer, c->table);
    spec->tokens_per_row = c->tokens_per_row;
    spec->ndim = 0;
    memset(spec->shape, 0, sizeof spec->shape);
    memset(spec->stride_order, 0, sizeof spec->stride_order);
}

static struct attn_cache_spec spec_of(const attn_layer *layer, int32_t index)
{
    const int32_t own = num_own(layer);
    const struct attn_layer_desc *l = layer->desc;
    struct attn_cache_spec spec = layer->spec;
    const bool has_rows = index < own && !layer->selected->has_states, value = index == 1;
    if (index >= own) {
        describe_further(layer, index - own, &spec);
    } else if (!has_rows) {
        describe_state(layer, value, &spec);
    } else if (value) {
        spec.role = ATTN_CACHE_V;
        spec.kv_dtype = kv_dtype_of(l, true);
        spec.head_size = l->head_size_v;
    }
    spec.page_bytes_alone = (int64_t)spec.block_size * spec.num_heads *
                            (has_rows ? layer_row_bytes(l, value) + layer_scales_apart(l, value)
                                      : kv_row_bytes(spec.kv_dtype, spec.head_size, false) +
                                            kv_scales_apart(spec.kv_dtype, false));
    if (index < own && layer_has_vendor_pages(layer)) { /* both of them */
        spec.page_bytes_alone = spec.page_bytes;
    } else if (index >= own) { /* the others have one memory for all of them */
        spec.page_bytes = spec.padded_page_bytes = spec.page_bytes_alone;
    }
    return spec;
}

static attn_status check_index(const attn_layer *layer, int32_t index, struct attn_error *error)
{
    return index >= 0 && index < layer_num_caches(layer)
               ? ATTN_OK
               : error_set(error, ATTN_ERROR_NOT_FOUND, "index",
                           "layer %p has %d caches; %d is none", (const void *)layer,
                           layer_num_caches(layer), index);
}

attn_status layer_cache_spec(const attn_layer *layer, int32_t index, struct attn_cache_spec *spec,
                             struct attn_error *error)
{
    TRY(check_index(layer, index, error));
    const struct attn_cache_spec own = spec_of(layer, index);
    return struct_give(spec, &own, ABI_CACHE_SPEC, error);
}

attn_status layer_cache_view(const attn_layer *layer, int32_t index, struct attn_kv_view *view,
                             struct attn_error *error)
{
    TRY(check_index(layer, index, error));
    const int32_t own = num_own(layer);
    const struct attn_kv_view *bound = index >= own ? &layer->further[index - own]
                                       : index == 1 ? &layer->v_cache
                                                    : &layer->k_cache;
    if (bound->data == NULL) {
        return error_set(error, ATTN_ERROR_ORDER, "layer_bind_caches",
                         "layer '%s' has no cache bound", layer->desc->name);
    }
    struct attn_kv_view known = *bound;
    known.struct_size = sizeof known;
    known.next = NULL;
    return struct_give(view, &known, ABI_KV_VIEW, error);
}

/* One of those beyond the kind's: read into `read`. */
static attn_status check_further(const attn_layer *layer, int32_t index,
                                 const struct attn_kv_view *view, struct attn_kv_view *read,
                                 struct attn_error *error)
{
    const struct attn_cache_spec spec = spec_of(layer, num_own(layer) + index);
    char which[32];
    snprintf(which, sizeof which, "cache %d", num_own(layer) + index);
    const struct wanted_view wanted = {
        which, spec.num_heads, spec.head_size, spec.kernel_block_size,
        spec.kv_dtype == ATTN_KV_NVFP4 ? spec.head_size / 2
                                       : kv_row_bytes(spec.kv_dtype, spec.head_size, false)};
    TRY(struct_read(read, ABI_KV_VIEW, view, error));
    TRY(view_cut(layer, which, spec.kernel_block_size, layer_parts(layer, spec.table), read,
                 error));
    TRY(check_view_shape(layer, &wanted, read, error));
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        const int32_t alignment = layer->served[phase].instance->caps->kv_alignment;
        if (alignment > 1 && (uintptr_t)read->data % (uintptr_t)alignment != 0) {
            return BAD("data", "layer '%s', %s: address %p is not a multiple of %d bytes",
                       layer->desc->name, which, read->data, alignment);
        }
    }
    return address_check_view(layer->model, read, which, error);
}

/* A state, heads one behind the other, and the convolution's window. */
static attn_status bind_states(attn_layer *layer, const struct attn_kv_view *const *views,
                               struct attn_error *error)
{
    struct attn_kv_view read[2] = {{0}, {0}};
    int64_t rows[2] = {0, 0};
    const int32_t count = num_own(layer);
    for (int32_t i = 0; i < count; i++) {
        const struct attn_cache_spec spec = spec_of(layer, i);
        const char *which = i == 1 ? "the window" : "the state";
        rows[i] = kv_row_bytes(spec.kv_dtype, spec.head_size, false);
        const struct wanted_view wanted = {which, spec.num_heads, spec.head_size, 1, rows[i]};
        TRY(struct_read(&read[i], ABI_KV_VIEW, views[i], error));
        TRY(check_view_shape(layer, &wanted, &read[i], error));
        TRY(address_check_view(layer->model, &read[i], which, error));
    }
    const int64_t element = kv_row_bytes(layer->desc->dtype, 1, false);
    const int64_t state_element =
        count > 0 ? kv_row_bytes(spec_of(layer, 0).kv_dtype, 1, false) : 1;
    if (read[0].stride_head != rows[0] || read[0].stride_block % state_element != 0 ||
        read[1].stride_block % element != 0 || read[1].stride_head % element != 0 ||
        (count == 2 && read[0].num_blocks != read[1].num_blocks)) {
        return BAD("stride_head",
                   "layer '%s': states lie head after head in whole elements, with as many slots "
                   "as windows",
                   layer->desc->name);
    }
    TRY(layer_check_unplanned(layer, "layer_bind_caches", error));
    layer_release_readers(layer);
    read[0].stride_slot = read[0].stride_head * read[0].num_heads;
    read[1].stride_slot = read[1].stride_block;
    layer->has_v_cache = count == 2;
    layer->k_cache = read[0];
    layer->v_cache = read[1];
    layer->row_bytes[0] = rows[0];
    layer->row_bytes[1] = rows[1];
    return ATTN_OK;
}

attn_status layer_bind_caches(attn_layer *layer, const struct attn_kv_view *const *views,
                              int32_t num_views, struct attn_error *error)
{
    struct attn_kv_view further[ATTN_MAX_CACHES];
    if (layer == NULL || views == NULL || num_views != layer_num_caches(layer) || num_views == 0) {
        return BAD("num_views", "layer %p, %d views at %p; the layer has %d caches", (void *)layer,
                   num_views, (const void *)views, layer_num_caches(layer));
    }
    const int32_t own = num_own(layer);
    for (int32_t i = 0; i < layer->num_further; i++) {
        TRY(check_further(layer, i, views[own + i], &further[i], error));
    }
    TRY(layer->selected->has_states
            ? bind_states(layer, views, error)
            : layer_bind_own(layer, views[0], own == 2 ? views[1] : NULL, error));
    for (int32_t i = 0; i < layer->num_further; i++) {
        layer->further[i] = further[i];
    }
    return ATTN_OK;
}

static attn_status check_memory(const attn_layer *layer, const struct attn_cache_memory *memory,
                                struct attn_error *error)
{
    if (memory->num_further != layer->num_further ||
        (memory->num_further > 0 &&
         (memory->further == NULL || memory->further_num_blocks == NULL))) {
        return BAD("further",
                   "layer '%s': %d addresses at %p, numbers of blocks at %p; it has %d caches "
                   "beyond those of its kind",
                   layer->desc->name, memory->num_further, (const void *)memory->further,
                   (const void *)memory->further_num_blocks, layer->num_further);
    }

    for (int32_t i = 0; i < memory->num_further; i++) {
        const struct attn_cache_spec spec = spec_of(layer, num_own(layer) + i);
        if (memory->further_num_blocks[i] < 1 ||
            memory->further_num_blocks[i] > MAX_CACHE / spec.page_bytes) {
            return BAD("further_num_blocks", "layer '%s': cache %d of %lld blocks; 1 to %lld",
                       layer->desc->name, num_own(layer) + i,
                       (long long)memory->further_num_blocks[i],
                       (long long)(MAX_CACHE / spec.page_bytes));
        }
    }
    return ATTN_OK;
}

/* The view of compact rows [block, slot, head], blocks so many bytes apart. */
static struct attn_kv_view rows_view(const struct attn_cache_spec *spec, void *data,
                                     int64_t num_blocks, int64_t stride, struct attn_device device)
{
    const int64_t row = kv_row_bytes(spec->kv_dtype, spec->head_size, false);
    return (struct attn_kv_view){.struct_size = sizeof(struct attn_kv_view),
                                 .data = data,
                                 .num_blocks = num_blocks,
                                 .block_size = spec->kernel_block_size,
                                 .num_heads = spec->num_heads,
                                 .head_size = spec->head_size,
                                 .stride_block = stride,
                                 .stride_slot = row * spec->num_heads,
                                 .stride_head = row,
                                 .device = device};
}

/* Pages of states: each with its window after it. */
static attn_status state_views(const attn_layer *layer, const struct attn_cache_memory *memory,
                               struct attn_kv_view views[2], struct attn_error *error)
{
    uint8_t *at = memory->base;
    if (memory->base == NULL || memory->num_blocks < 1) {
        return BAD("base", "layer '%s': %lld slots at %p; an address and at least 1",
                   layer->desc->name, (long long)memory->num_blocks, memory->base);
    }
    for (int32_t i = 0; i < num_own(layer); i++) {
        const struct attn_cache_spec spec = spec_of(layer, i);
        views[i] = rows_view(&spec, at, memory->num_blocks, spec.padded_page_bytes, memory->device);
        at += views[i].stride_slot;
    }
    return ATTN_OK;
}

static struct attn_kv_view further_view(const attn_layer *layer, int32_t index,
                                        const struct attn_cache_memory *memory)
{
    const struct attn_cache_spec s = spec_of(layer, num_own(layer) + index);
    const int64_t scale = kv_scale_bytes(s.kv_dtype, s.head_size, false);
    const int32_t parts = layer_parts(layer, s.table);
    struct attn_kv_view view =
        rows_view(&s, memory->further[index], memory->further_num_blocks[index] * parts,
                  s.page_bytes / parts, memory->device);
    if (s.kv_dtype == ATTN_KV_NVFP4) { /* behind each row */
        view.scale = (uint8_t *)view.data + s.head_size / 2;
        view.scale_stride_block = view.stride_block;
        view.scale_stride_slot = view.stride_slot;
        view.scale_stride_head = view.stride_head;
    } else if (scale > 0) { /* behind the rows of a block */
        view.scale = (uint8_t *)view.data + view.block_size * view.stride_slot;
        view.scale_stride_block = view.stride_block;
        view.scale_stride_slot = scale * s.num_heads;
        view.scale_stride_head = scale;
    }
    return view;
}

attn_status layer_bind_memory(attn_layer *layer, const struct attn_cache_memory *memory,
                              struct attn_error *error)
{
    struct attn_cache_memory read;
    struct attn_kv_view views[2 + ATTN_MAX_CACHES];
    const struct attn_kv_view *list[2 + ATTN_MAX_CACHES];
    if (layer == NULL || layer_num_caches(layer) == 0) {
        return BAD("layer", "layer %p has no cache of its own", (void *)layer);
    }
    const int32_t own = num_own(layer);
    TRY(struct_read(&read, ABI_CACHE_MEMORY, memory, error));
    TRY(check_memory(layer, &read, error));
    TRY(layer->selected->has_states ? state_views(layer, &read, views, error)
                                    : layer_kv_views(layer, read.base, read.num_blocks, &views[0],
                                                     own == 2 ? &views[1] : NULL, error));
    for (int32_t i = 0; i < own && read.device.type != 0; i++) {
        views[i].device = read.device;
    }
    for (int32_t i = 0; i < layer->num_further; i++) {
        views[own + i] = further_view(layer, i, &read);
    }
    for (int32_t i = 0; i < own + layer->num_further; i++) {
        list[i] = &views[i];
    }
    return layer_bind_caches(layer, list, own + layer->num_further, error);
}
