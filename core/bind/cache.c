/* SPDX-License-Identifier: Apache-2.0 */
/* Memory handed in for K and V, checked before anything is kept. */

#include "bind/bound.h"
#include "bind/model.h"
#include "bind/address_check.h"
#include "select/match.h"
#include "select/names.h"
#include "util/structs.h"
#include "util/tensor.h"
#include "util/counts.h"

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

/* Bytes of a row without block scales, which have a place of their own, behind the row or apart. */
static int64_t data_bytes(const struct attn_layer_desc *l, bool value)
{
    return layer_row_bytes(l, value) - (layer_scale_bytes(l, value) - layer_scales_apart(l, value));
}

static attn_status check_sizes(const attn_layer *layer, const struct wanted_view *wanted,
                               const struct attn_kv_view *view, struct attn_error *error)
{
    return view->num_heads == wanted->num_heads && view->head_size == wanted->head_size &&
                   view->block_size == wanted->block_size
               ? ATTN_OK
               : BAD("num_heads",
                     "layer '%s', %s: %d heads of %d in blocks of %d; it has %d heads of %d in "
                     "blocks of %d",
                     layer->desc->name, wanted->which, view->num_heads, view->head_size,
                     view->block_size, wanted->num_heads, wanted->head_size, wanted->block_size);
}

attn_status check_view_shape(const attn_layer *layer, const struct wanted_view *wanted,
                             const struct attn_kv_view *view, struct attn_error *error)
{
    const char *name = layer->desc->name, *which = wanted->which;
    const int32_t head_size = wanted->head_size;
    const int64_t row = wanted->row_bytes;
    int32_t pack = view->pack > 0 ? view->pack : head_size;
    if (view->data == NULL || view->num_blocks <= 0) {
        return BAD("data", "layer '%s', %s: data %p, %lld blocks; an address and at least 1 block",
                   name, which, view->data, (long long)view->num_blocks);
    }
    TRY(check_sizes(layer, wanted, view, error));
    if (view->pack < 0 || (pack > 0 && head_size % pack != 0)) {
        return BAD("pack", "layer '%s', %s: pack is %d; it must divide %d", name, which, view->pack,
                   head_size);
    }
    if (view->stride_block <= 0 || view->stride_slot <= 0 || view->stride_head <= 0) {
        return BAD("stride_block", "layer '%s', %s: strides %lld, %lld, %lld; all must be above 0",
                   name, which, (long long)view->stride_block, (long long)view->stride_slot,
                   (long long)view->stride_head);
    }
    const struct layout layout = layout_of(view, row);
    int64_t reach = layout_reach(&layout, 0);
    if (reach > MAX_CACHE) {
        return error_set(error, ATTN_ERROR_LIMIT, "num_blocks",
                         "layer '%s', %s: %lld blocks with strides %lld, %lld, %lld and %lld end "
                         "more than 2^%d bytes behind the first",
                         name, which, (long long)view->num_blocks, (long long)view->stride_block,
                         (long long)view->stride_slot, (long long)view->stride_head,
                         (long long)view->stride_pack, MAX_CACHE_BITS);
    }
    if (reach < 0) {
        return BAD("stride_slot",
                   "layer '%s', %s: strides (block %lld, slot %lld, head %lld, pack %lld bytes) "
                   "make rows of %lld bytes overlap",
                   name, which, (long long)view->stride_block, (long long)view->stride_slot,
                   (long long)view->stride_head, (long long)view->stride_pack, (long long)row);
    }
    return ATTN_OK;
}

static attn_status check_view(const attn_layer *layer, const struct attn_kv_view *view, bool value,
                              struct attn_error *error)
{
    const struct attn_layer_desc *l = layer->desc;
    const struct wanted_view wanted = {
        value ? "v" : "k", l->num_kv_heads, value ? l->head_size_v : l->head_size,
        l->block_size / layer->selected->tokens_per_row, data_bytes(l, value)};
    const int32_t dtype = kv_dtype_of(l, value);
    TRY(check_view_shape(layer, &wanted, view, error));
    if (view->scale == NULL && layer_scale_bytes(l, value) > 0) {
        return BAD("scale", "layer '%s', %s: scale is NULL; a row of %s has one of its own",
                   l->name, wanted.which, code_text(ATTN_NAMES_KV_DTYPE, dtype).text);
    }
    if (kv_rows_are_whole(dtype) && view->pack > 0 && view->pack < wanted.head_size) {
        return BAD("pack", "layer '%s', %s: pack is %d; a row of %s is in one piece", l->name,
                   wanted.which, view->pack, code_text(ATTN_NAMES_KV_DTYPE, dtype).text);
    }
    return ATTN_OK;
}

static attn_status check_view_form(const attn_layer *layer, const struct attn_kv_view *view,
                                   bool value, struct attn_error *error)
{
    const char *name = layer->desc->name, *which = value ? "v" : "k";
    bool packed = view->pack > 0 && view->pack < view->head_size;
    bool nhd = view->stride_slot >= view->stride_head;
    uint64_t forms = layer->spec.layout == ATTN_KV_LAYOUT_LATENT ? ATTN_VIEW_LATENT
                     : nhd                                       ? ATTN_VIEW_NHD
                                                                 : ATTN_VIEW_HND;
    forms |= packed ? ATTN_VIEW_PACKED : 0;
    if (view->num_heads == 1 || view->block_size == 1) { /* both orders are the same */
        forms &= ~(ATTN_VIEW_NHD | ATTN_VIEW_HND);
    }
    const int32_t dtype = kv_dtype_of(layer->desc, value);
    const int32_t element = dtype == ATTN_KV_F32                            ? 4
                            : dtype == ATTN_KV_F16 || dtype == ATTN_KV_BF16 ? 2
                                                                            : 1;
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        const struct attn_backend_caps *caps = layer->served[phase].instance->caps;
        const int32_t alignment = caps->kv_alignment > element ? caps->kv_alignment : element;
        if ((caps->view_forms & forms) != forms) {
            return error_set(error, ATTN_ERROR_UNSUPPORTED, "view_forms",
                             "layer '%s', %s: the view is %s%s, and %s for %s does not read it",
                             name, which, nhd ? "nhd" : "hnd", packed ? ", packed" : "", caps->name,
                             name_of_phase(phase));
        }
        if ((uintptr_t)view->data % (uintptr_t)alignment != 0 ||
            view->stride_block % alignment != 0 || view->stride_slot % alignment != 0 ||
            view->stride_head % alignment != 0) {
            return BAD("data",
                       "layer '%s', %s: address %p or a stride (%lld, %lld, %lld) is not a "
                       "multiple of %d bytes, which %s needs",
                       name, which, view->data, (long long)view->stride_block,
                       (long long)view->stride_slot, (long long)view->stride_head, alignment,
                       caps->name);
        }
    }
    return ATTN_OK;
}

/* K's or V's view in a layout of the vendor's: its pages. */
static attn_status check_pages(const attn_layer *layer, const struct attn_kv_view *view, bool value,
                               struct attn_error *error)
{
    const struct attn_layer_desc *l = layer->desc;
    const char *which = value ? "v" : "k";
    const int64_t page = layer->spec.page_bytes / layer_parts(layer, 0);
    const int32_t head_size = value ? l->head_size_v : l->head_size;
    if (view->data == NULL || (uintptr_t)view->data % (uintptr_t)layer->spec.alignment != 0 ||
        view->num_blocks <= 0 || view->stride_block < page ||
        view->num_blocks > MAX_CACHE / view->stride_block) {
        return BAD("data",
                   "layer '%s', %s: %lld blocks at %p, %lld bytes apart; in layout %#x at least 1 "
                   "at a multiple of %d, %lld bytes or more apart, within 2^%d bytes",
                   l->name, which, (long long)view->num_blocks, view->data,
                   (long long)view->stride_block, (unsigned)layer->spec.layout,
                   layer->spec.alignment, (long long)page, MAX_CACHE_BITS);
    }
    if (view->stride_slot != 0 || view->stride_head != 0 || view->stride_pack != 0 ||
        view->pack != 0 || view->scale != NULL) {
        return BAD("stride_slot",
                   "layer '%s', %s: strides (slot %lld, head %lld, pack %lld), pack %d or a scale; "
                   "none of them is there in layout %#x",
                   l->name, which, (long long)view->stride_slot, (long long)view->stride_head,
                   (long long)view->stride_pack, view->pack, (unsigned)layer->spec.layout);
    }
    const struct wanted_view wanted = {which, l->num_kv_heads, head_size, l->block_size, 0};
    return check_sizes(layer, &wanted, view, error);
}

/* K's and V's views name the same pages. */
static attn_status check_same_pages(const attn_layer *layer, const struct attn_kv_view views[2],
                                    struct attn_error *error)
{
    return views[0].data == views[1].data && views[0].num_blocks == views[1].num_blocks &&
                   views[0].stride_block == views[1].stride_block
               ? ATTN_OK
               : BAD("data",
                     "layer '%s': k has %lld blocks at %p, %lld bytes apart, v %lld at %p, %lld "
                     "apart; in layout %#x they are the same",
                     layer->desc->name, (long long)views[0].num_blocks, views[0].data,
                     (long long)views[0].stride_block, (long long)views[1].num_blocks,
                     views[1].data, (long long)views[1].stride_block, (unsigned)layer->spec.layout);
}

/* K and V: as many blocks of each, and no byte is both. */
static attn_status check_apart(const attn_layer *layer, const struct attn_kv_view views[2],
                               struct attn_error *error)
{
    const struct attn_layer_desc *l = layer->desc;
    const struct layout k = layout_of(&views[0], data_bytes(l, false));
    const struct layout v = layout_of(&views[1], data_bytes(l, true));
    if (views[0].num_blocks != views[1].num_blocks) {
        return BAD("num_blocks", "layer '%s': k has %lld blocks, v %lld", l->name,
                   (long long)views[0].num_blocks, (long long)views[1].num_blocks);
    }
    /* either may lie at any address: the distance need not fit in 63 bits */
    const uintptr_t low = (uintptr_t)(k.data < v.data ? k.data : v.data);
    const uintptr_t high = (uintptr_t)(k.data < v.data ? v.data : k.data);
    const int64_t apart = high - low > MAX_CACHE ? MAX_CACHE : (int64_t)(high - low);
    /* One pool of pages seen twice, a page apart, is an engine's own: its table names the pages of
     * K and by them those of V (Transformers' continuous batching). */
    const int64_t page = views[0].stride_block;
    const bool pool = apart > 0 && views[1].stride_block == page && apart % page == 0;
    if (!pool && layouts_meet(&k, &v, 0, k.data < v.data ? apart : -apart)) {
        return BAD("data",
                   "layer '%s': k at %p and v at %p (strides %lld, %lld, %lld and %lld, %lld, %lld "
                   "bytes) share bytes; each row needs memory of its own",
                   l->name, views[0].data, views[1].data, (long long)views[0].stride_block,
                   (long long)views[0].stride_slot, (long long)views[0].stride_head,
                   (long long)views[1].stride_block, (long long)views[1].stride_slot,
                   (long long)views[1].stride_head);
    }
    return ATTN_OK;
}

attn_status layer_check_unplanned(attn_layer *layer, const char *call, struct attn_error *error)
{
    const bool taken = lock_take(&layer->model->lock);
    int32_t plans = layer->num_plans;
    if (taken) {
        lock_give(&layer->model->lock);
    }
    return plans == 0
               ? ATTN_OK
               : error_set(error, ATTN_ERROR_ORDER, call,
                           "layer '%s' is in %d plans, and takes new memory in none; destroy them "
                           "first, or change what the memory holds",
                           layer->desc->name, plans);
}

attn_status view_cut(const attn_layer *layer, const char *which, int32_t kernel, int32_t parts,
                     struct attn_kv_view *view, struct attn_error *error)
{
    if (parts == 1 || view->block_size != kernel * parts) {
        return ATTN_OK;
    }
    const bool scales = view->scale != NULL;
    if (view->num_blocks < 0 || view->num_blocks > MAX_CACHE / parts ||
        view->stride_slot > MAX_CACHE / view->block_size ||
        view->scale_stride_slot > MAX_CACHE / view->block_size ||
        view->stride_block != view->stride_slot * view->block_size ||
        (scales && view->scale_stride_block != view->scale_stride_slot * view->block_size)) {
        return BAD("block_size",
                   "layer '%s', %s: blocks of %d whose slots are %lld bytes apart and which "
                   "themselves are %lld apart are not cut into the kernel's blocks of %d; bind "
                   "views of %d, as layer_bind_memory makes them",
                   layer->desc->name, which, view->block_size, (long long)view->stride_slot,
                   (long long)view->stride_block, kernel, kernel);
    }
    view->num_blocks *= parts;
    view->block_size = kernel;
    view->stride_block /= parts;
    view->scale_stride_block /= parts;
    return ATTN_OK;
}

attn_status layer_bind_own(attn_layer *layer, const struct attn_kv_view *k,
                           const struct attn_kv_view *v, struct attn_error *error)
{
    struct attn_kv_view views[2];
    if (layer == NULL) {
        return BAD("layer", "layer is NULL");
    }
    if (layer->spec.kind == ATTN_KV_SPEC_NONE || layer->spec.kind == ATTN_KV_SPEC_STATE) {
        return BAD("layer", "layer '%s' takes no cache: %s", layer->desc->name,
                   layer->owner != layer ? "it reads that of its kv_sharing_target"
                                         : "its kind has none");
    }
    bool latent = layer->spec.layout == ATTN_KV_LAYOUT_LATENT;
    if (k == NULL || (v == NULL) != latent) {
        return BAD(
            "v", "layer '%s': k %p, v %p; %s", layer->desc->name, (const void *)k, (const void *)v,
            latent ? "a layer of kind mla, indexer or compressor has k only" : "both are needed");
    }
    const bool pages = layer_has_vendor_pages(layer);
    for (int32_t i = 0; i < (latent ? 1 : 2); i++) {
        const char *which = i == 1 ? "v" : "k";
        TRY(struct_read(&views[i], ABI_KV_VIEW, i == 1 ? v : k, error));
        if (pages) {
            TRY(check_pages(layer, &views[i], i == 1, error));
        } else {
            TRY(view_cut(layer, which, layer->spec.kernel_block_size, layer_parts(layer, 0),
                         &views[i], error));
            TRY(check_view(layer, &views[i], i == 1, error));
            TRY(check_view_form(layer, &views[i], i == 1, error));
        }
        TRY(address_check_view(layer->model, &views[i], which, error));
    }
    if (!latent) {
        TRY(pages ? check_same_pages(layer, views, error) : check_apart(layer, views, error));
    }
    TRY(layer_check_unplanned(layer, "layer_bind_caches", error));
    layer_release_readers(layer);
    layer->k_cache = views[0];
    layer->has_v_cache = !latent;
    layer->row_bytes[0] = data_bytes(layer->desc, false);
    layer->row_bytes[1] = data_bytes(layer->desc, true);
    if (!latent) {
        layer->v_cache = views[1];
    }
    return ATTN_OK;
}
