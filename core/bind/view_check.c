/* SPDX-License-Identifier: Apache-2.0 */
/* Memory handed in for K and V, checked before anything is kept. */
#include <stdio.h>

#include "bind/address_check.h"
#include "bind/bound.h"
#include "select/match.h"
#include "select/names.h"

/* One dimension of a view, for finding overlaps. */
struct extent {
    int64_t count;
    int64_t stride;
};

/* The rows of one view as dimensions by falling stride, without those of one element. */
struct layout {
    uint8_t *data;
    int64_t row_bytes;
    struct extent extents[4];
    int32_t count;
};

static void layout_add(struct layout *layout, int64_t count, int64_t stride)
{
    int32_t at = layout->count;
    if (count <= 1) {
        return;
    }
    for (; at > 0 && layout->extents[at - 1].stride < stride; at--) {
        layout->extents[at] = layout->extents[at - 1];
    }
    layout->extents[at] = (struct extent){count, stride};
    layout->count++;
}

static struct layout layout_of(const struct attn_kv_view *view, int64_t row_bytes)
{
    const int32_t pack = view->pack > 0 ? view->pack : view->head_size;
    const bool packed = pack < view->head_size;
    struct layout layout = {.data = view->data,
                            .row_bytes = packed ? row_bytes / view->head_size * pack : row_bytes};
    layout_add(&layout, view->num_blocks, view->stride_block);
    layout_add(&layout, view->block_size, view->stride_slot);
    layout_add(&layout, view->num_heads, view->stride_head);
    layout_add(&layout, packed ? view->head_size / pack : 1, view->stride_pack);
    return layout;
}

/* Bytes from the first row to the end of the last, of dimension `from` and those within it; -1 if
 * rows overlap, above MAX_CACHE if that is where they end. */
static int64_t layout_reach(const struct layout *layout, int32_t from)
{
    int64_t reach = layout->row_bytes;
    for (int32_t i = layout->count - 1; i >= from; i--) {
        const struct extent *e = &layout->extents[i];
        if (e->stride < reach) {
            return -1;
        }
        if (e->count - 1 > (MAX_CACHE - reach) / e->stride) {
            return MAX_CACHE + 1;
        }
        reach += e->stride * (e->count - 1);
    }
    return reach;
}

/* Do rows of both share bytes? `distance` from a's to b's first. Views that lie within each other
 * have to step alike there: what no kernel's layout is counts as sharing. */
static bool layouts_meet(const struct layout *a, const struct layout *b, int32_t from,
                         int64_t distance)
{
    if (distance < 0) {
        return layouts_meet(b, a, from, -distance);
    }
    if (distance >= layout_reach(a, from)) {
        return false;
    }
    if (from >= a->count || from >= b->count ||
        a->extents[from].stride != b->extents[from].stride) {
        return true;
    }
    int64_t stride = a->extents[from].stride, rest = distance % stride;
    return layouts_meet(a, b, from + 1, rest) || layouts_meet(a, b, from + 1, rest - stride);
}

static attn_status check_sizes(const attn_layer *layer, const struct cache *cache,
                               const struct attn_kv_view *view, struct attn_error *error)
{
    const struct attn_cache_spec *spec = &cache->spec;
    return view->num_heads == spec->num_heads && view->head_size == spec->head_size &&
                   view->block_size == spec->kernel_block_size
               ? ATTN_OK
               : BAD("num_heads",
                     "layer '%s', %s: %d heads of %d in blocks of %d; it has %d heads of %d in "
                     "blocks of %d",
                     layer->desc->name, cache->name, view->num_heads, view->head_size,
                     view->block_size, spec->num_heads, spec->head_size, spec->kernel_block_size);
}

/* An address, the sizes, and strides under which no two rows share bytes. */
static attn_status check_shape(const attn_layer *layer, const struct cache *cache,
                               const struct attn_kv_view *view, struct attn_error *error)
{
    const char *name = layer->desc->name, *which = cache->name;
    const int32_t head_size = view->head_size, pack = view->pack > 0 ? view->pack : head_size;
    char strides[120];
    BAD_IF(view->data == NULL || view->num_blocks <= 0, "data",
           "layer '%s', %s: data %p, %lld blocks; an address and at least 1 block", name, which,
           view->data, (long long)view->num_blocks);
    TRY(check_sizes(layer, cache, view, error));
    BAD_IF(view->pack < 0 || (pack > 0 && head_size % pack != 0), "pack",
           "layer '%s', %s: pack is %d; it must divide %d", name, which, view->pack, head_size);
    snprintf(strides, sizeof strides, "strides (block %lld, slot %lld, head %lld, pack %lld bytes)",
             (long long)view->stride_block, (long long)view->stride_slot,
             (long long)view->stride_head, (long long)view->stride_pack);
    BAD_IF(view->stride_block <= 0 || view->stride_slot <= 0 || view->stride_head <= 0,
           "stride_block", "layer '%s', %s: %s; the first three must be above 0", name, which,
           strides);
    const struct layout layout = layout_of(view, cache->row.data);
    int64_t reach = layout_reach(&layout, 0);
    ERROR_IF(reach > MAX_CACHE, ATTN_ERROR_LIMIT, "num_blocks",
             "layer '%s', %s: %lld blocks with %s end more than 2^%d bytes after the first", name,
             which, (long long)view->num_blocks, strides, MAX_CACHE_BITS);
    return reach >= 0 ? ATTN_OK
                      : BAD("stride_slot", "layer '%s', %s: %s make rows of %lld bytes overlap",
                            name, which, strides, (long long)cache->row.data);
}

/* Rows of K or V, or latent ones, as the backends read them. */
static attn_status check_form(const attn_layer *layer, const struct cache *cache,
                              const struct attn_kv_view *view, struct attn_error *error)
{
    const char *name = layer->desc->name, *which = cache->name;
    const int32_t dtype = cache->spec.kv_dtype;
    const bool packed = view->pack > 0 && view->pack < view->head_size;
    const bool nhd = view->stride_slot >= view->stride_head;
    uint64_t forms = layer->spec.layout == ATTN_KV_LAYOUT_LATENT ? ATTN_VIEW_LATENT
                     : nhd                                       ? ATTN_VIEW_NHD
                                                                 : ATTN_VIEW_HND;
    BAD_IF(view->scale == NULL && cache->row.scale > 0, "scale",
           "layer '%s', %s: scale is NULL; a row of %s has one of its own", name, which,
           code_text(ATTN_NAMES_KV_DTYPE, dtype).text);
    BAD_IF((kv_rows_are_whole(dtype) || layer->selected->compressor != NULL) && packed, "pack",
           "layer '%s', %s: pack is %d; a row of %s is in one piece", name, which, view->pack,
           code_text(ATTN_NAMES_KV_DTYPE, dtype).text);
    forms |= packed ? ATTN_VIEW_PACKED : 0;
    if (view->num_heads == 1 || view->block_size == 1) { /* both orders are the same */
        forms &= ~(ATTN_VIEW_NHD | ATTN_VIEW_HND);
    }
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        const struct attn_backend_caps *caps = layer->served[phase].instance->caps;
        ERROR_IF((caps->view_forms & forms) != forms, ATTN_ERROR_UNSUPPORTED, "view_forms",
                 "layer '%s', %s: the view is %s%s, and %s for %s does not read it", name, which,
                 nhd ? "nhd" : "hnd", packed ? ", packed" : "", caps->name,
                 name_of(ATTN_NAMES_PHASE, phase));
    }
    return ATTN_OK;
}

/* The address and, of rows, the strides. Those of a ring are multiples of 4, those of other further
 * caches any. */
static attn_status check_alignment(const attn_layer *layer, const struct cache *cache, bool rows,
                                   const struct attn_kv_view *view, struct attn_error *error)
{
    const int32_t dtype = cache->spec.kv_dtype;
    const bool ring = cache->spec.role == ATTN_CACHE_REPLAY; /* its gates are float32 */
    const int32_t element = ring                           ? 4
                            : !rows || dtype > ATTN_KV_F32 ? 1
                            : dtype == ATTN_KV_F32         ? 4
                                                           : 2;
    const int64_t strides = view->stride_block | view->stride_slot | view->stride_head;
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        const struct attn_backend_caps *caps = layer->served[phase].instance->caps;
        const int32_t alignment = caps->kv_alignment > element ? caps->kv_alignment : element;
        BAD_IF((uintptr_t)view->data % (uintptr_t)alignment != 0 ||
                   (ring && strides % element != 0) ||
                   (rows &&
                    (view->stride_block % alignment != 0 || view->stride_slot % alignment != 0 ||
                     view->stride_head % alignment != 0)),
               "data",
               "layer '%s', %s: address %p or a stride (%lld, %lld, %lld) is not a multiple of %d "
               "bytes, which %s needs",
               layer->desc->name, cache->name, view->data, (long long)view->stride_block,
               (long long)view->stride_slot, (long long)view->stride_head, alignment, caps->name);
    }
    return ATTN_OK;
}

/* K's or V's view in a layout of the vendor's: its pages. */
static attn_status check_pages(const attn_layer *layer, const struct cache *cache,
                               const struct attn_kv_view *view, struct attn_error *error)
{
    const char *name = layer->desc->name;
    const int64_t page = layer->spec.page_bytes / layer_parts(layer, 0);
    BAD_IF(view->data == NULL || (uintptr_t)view->data % (uintptr_t)layer->spec.alignment != 0 ||
               view->num_blocks <= 0 || view->stride_block < page ||
               view->num_blocks > MAX_CACHE / view->stride_block,
           "data",
           "layer '%s', %s: %lld blocks at %p, %lld bytes apart; in layout %#x at least 1 at a "
           "multiple of %d, %lld bytes or more apart, within 2^%d bytes",
           name, cache->name, (long long)view->num_blocks, view->data,
           (long long)view->stride_block, (unsigned)layer->spec.layout, layer->spec.alignment,
           (long long)page, MAX_CACHE_BITS);
    BAD_IF(view->stride_slot != 0 || view->stride_head != 0 || view->stride_pack != 0 ||
               view->pack != 0 || view->scale != NULL,
           "stride_slot",
           "layer '%s', %s: strides (slot %lld, head %lld, pack %lld), pack %d or a scale; none of "
           "them is there in layout %#x",
           name, cache->name, (long long)view->stride_slot, (long long)view->stride_head,
           (long long)view->stride_pack, view->pack, (unsigned)layer->spec.layout);
    return check_sizes(layer, cache, view, error);
}

/* A view of the engine's blocks, of kernel x parts rows, as one of the kernel's: parts of a block
 * lie one after the other where its slots do. Other views stay. */
static attn_status cut(const attn_layer *layer, const struct cache *cache,
                       struct attn_kv_view *view, struct attn_error *error)
{
    const int32_t kernel = cache->spec.kernel_block_size;
    const int32_t parts = layer_parts(layer, cache->spec.table);
    if (parts == 1 || view->block_size != kernel * parts) {
        return ATTN_OK;
    }
    BAD_IF(view->num_blocks < 0 || view->num_blocks > MAX_CACHE / parts ||
               view->stride_slot > MAX_CACHE / view->block_size ||
               view->scale_stride_slot > MAX_CACHE / view->block_size ||
               view->stride_block != view->stride_slot * view->block_size ||
               (view->scale != NULL &&
                view->scale_stride_block != view->scale_stride_slot * view->block_size),
           "block_size",
           "layer '%s', %s: blocks of %d whose slots are %lld bytes apart and which themselves are "
           "%lld apart are not cut into the kernel's blocks of %d; bind views of %d, as "
           "layer_bind_memory makes them",
           layer->desc->name, cache->name, view->block_size, (long long)view->stride_slot,
           (long long)view->stride_block, kernel, kernel);
    view->num_blocks *= parts;
    view->block_size = kernel;
    view->stride_block /= parts;
    view->scale_stride_block /= parts;
    return ATTN_OK;
}

attn_status cache_read_view(const attn_layer *layer, const struct cache *cache,
                            const struct attn_kv_view *given, struct attn_kv_view *view,
                            struct attn_error *error)
{
    const bool own = cache < layer->all + layer->num_own,
               states = own && layer->selected->has_states,
               rows = own || cache->spec.role == ATTN_CACHE_COMPRESSED;
    TRY(struct_read(view, ABI_KV_VIEW, given, error));
    BAD_IF(layer->selected->has_states && view->pack > 0 && view->pack < view->head_size, "pack",
           "layer '%s', %s: pack is %d; a row of states is in one piece (0)", layer->desc->name,
           cache->name, view->pack);
    if (own && layer_has_vendor_pages(layer)) {
        TRY(check_pages(layer, cache, view, error));
    } else {
        TRY(cut(layer, cache, view, error));
        TRY(check_shape(layer, cache, view, error));
        TRY_IF(rows && !states, check_form(layer, cache, view, error));
        TRY_IF(!states, check_alignment(layer, cache, rows, view, error));
    }
    return address_check_view(layer->model, view, cache->name, error);
}

attn_status cache_check_pair(const attn_layer *layer, const struct attn_kv_view views[2],
                             struct attn_error *error)
{
    const struct attn_kv_view *k = &views[0], *v = &views[1];
    const bool pages = layer_has_vendor_pages(layer);
    BAD_IF(k->num_blocks != v->num_blocks, "num_blocks", "layer '%s': k has %lld blocks, v %lld",
           layer->desc->name, (long long)k->num_blocks, (long long)v->num_blocks);
    const struct layout rows_k = layout_of(k, layer->all[0].row.data);
    const struct layout rows_v = layout_of(v, layer->all[1].row.data);
    /* either may lie at any address: the distance need not fit in 63 bits */
    const uintptr_t at_k = (uintptr_t)k->data, at_v = (uintptr_t)v->data;
    const uintptr_t distance = at_k < at_v ? at_v - at_k : at_k - at_v;
    const int64_t apart = distance > MAX_CACHE ? MAX_CACHE : (int64_t)distance;
    /* One pool of pages seen twice, a page apart, is an engine's own: its table names the pages of
     * K and by them those of V (Transformers' continuous batching). */
    const int64_t page = k->stride_block;
    const bool pool = apart > 0 && v->stride_block == page && apart % page == 0;
    BAD_IF(pages ? at_k != at_v || v->stride_block != page
                 : !pool && layouts_meet(&rows_k, &rows_v, 0, at_k < at_v ? apart : -apart),
           "data",
           "layer '%s': k at %p and v at %p (strides %lld, %lld, %lld and %lld, %lld, %lld bytes) "
           "%s",
           layer->desc->name, k->data, v->data, (long long)k->stride_block,
           (long long)k->stride_slot, (long long)k->stride_head, (long long)v->stride_block,
           (long long)v->stride_slot, (long long)v->stride_head,
           pages ? "are not the same pages, as in a layout of the vendor's"
                 : "share bytes; each row needs memory of its own");
    return ATTN_OK;
}

attn_status layer_check_unplanned(attn_layer *layer, const char *call, struct attn_error *error)
{
    const bool taken = lock_take(&layer->model->lock);
    int32_t plans = layer->num_plans;
    if (taken) {
        lock_give(&layer->model->lock);
    }
    return plans == 0 ? ATTN_OK
                      : error_set(error, ATTN_ERROR_ORDER, call,
                                  "layer '%s' is in %d plans, and takes new memory in none; "
                                  "destroy them first, or change what the memory holds",
                                  layer->desc->name, plans);
}
