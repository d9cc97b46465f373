/* SPDX-License-Identifier: Apache-2.0 */
/* What a layer's cache is made of: page bytes, shape and stride order of the layout that its
 * backend would like. */
#include "bind/bound.h"
#include "select/match.h"

#define ALIGNMENT 256
#define MAX_PAGE ((int64_t)1 << 48) /* as of padded_page_bytes */

/* Rows of K and of V: 32nds of a byte of an element, 0 being a byte; bytes of scales that stand in
 * a row, and of those that stand apart. TurboQuant has a 16-bit norm after rotated keys, a 16-bit
 * scale and zero after values; Q8_0 and Q4_0 have a 16-bit step before 32 elements. */
static const struct kv_form {
    uint8_t element[2], in_row[2], apart[2];
} forms[NUM_KV_DTYPES] = {[ATTN_KV_F32] = {{128, 128}},
                          [ATTN_KV_F16] = {{64, 64}},
                          [ATTN_KV_BF16] = {{64, 64}},
                          [ATTN_KV_FP8_PER_TOKEN_HEAD] = {.apart = {4, 4}},
                          [ATTN_KV_INT8_PER_TOKEN_HEAD] = {.apart = {4, 4}},
                          [ATTN_KV_INT4_PER_TOKEN_HEAD] = {{16, 16}, .apart = {4, 4}},
                          [ATTN_KV_INT8_KV] = {.apart = {4, 0}},
                          [ATTN_KV_INT8_K] = {{32, 64}, .apart = {4, 0}},
                          [ATTN_KV_NVFP4] = {{18, 18}}, /* a byte of scale per 16 elements */
                          [ATTN_KV_FP8_DS_V4] = {.apart = {8, 0}},
                          [ATTN_KV_MXFP4] = {{16, 16}}, /* a byte apart per 32 elements */
                          [ATTN_KV_TURBOQUANT_K8V4] = {{32, 16}, {0, 4}},
                          [ATTN_KV_TURBOQUANT_4BIT_NC] = {{16, 16}, {2, 4}},
                          [ATTN_KV_TURBOQUANT_K3V4_NC] = {{12, 16}, {2, 4}},
                          [ATTN_KV_TURBOQUANT_3BIT_NC] = {{12, 12}, {2, 4}},
                          [ATTN_KV_Q8_0] = {{34, 34}},
                          [ATTN_KV_Q4_0] = {{18, 18}}};

struct kv_row kv_row(int32_t kv_dtype, int32_t head_size, bool value)
{
    const struct kv_form *form = &forms[kv_dtype < NUM_KV_DTYPES ? kv_dtype : ATTN_KV_AUTO];
    const int64_t element = form->element[value] > 0 ? form->element[value] : 32;
    const int64_t in_row = kv_dtype == ATTN_KV_NVFP4 ? head_size / 16 : form->in_row[value];
    const int64_t bytes = kv_dtype == ATTN_KV_FP8_DS_MLA ? 656
                          : kv_dtype == ATTN_KV_FP8_DS_V4
                              ? (int64_t)head_size + 64 /* the last 64 in bf16 */
                              : head_size * element / 32 + form->in_row[value];
    const int64_t apart = kv_dtype == ATTN_KV_MXFP4 ? head_size / 32 : form->apart[value];
    return (struct kv_row){bytes, bytes - in_row, in_row + apart, apart};
}

struct kv_row layer_row(const struct attn_layer_desc *l, bool value)
{
    const int64_t bytes = value ? l->kv_row_bytes_v : l->kv_row_bytes;
    const int64_t scale = value ? l->kv_scale_bytes_v : l->kv_scale_bytes;
    return kv_is_opaque(kv_dtype_of(l, value))
               ? (struct kv_row){bytes, bytes, scale, scale}
               : kv_row(kv_dtype_of(l, value), value ? l->head_size_v : l->head_size, value);
}

static int32_t spec_kind(const struct layer *layer)
{
    const struct attn_layer_desc *l = &layer->desc;
    if (!layer_has_cache(l) || layer->sharing_target >= 0) {
        return ATTN_KV_SPEC_NONE;
    }
    if (layer->is_latent) {
        return l->has_window ? ATTN_KV_SPEC_SLIDING_WINDOW_MLA : ATTN_KV_SPEC_MLA;
    }
    return layer->has_states             ? ATTN_KV_SPEC_STATE
           : l->kind == ATTN_LAYER_CROSS ? ATTN_KV_SPEC_CROSS
           : l->sink_len > 0             ? ATTN_KV_SPEC_SINK_FULL
           : l->chunk_size > 0           ? ATTN_KV_SPEC_CHUNKED_LOCAL
           : l->has_window               ? ATTN_KV_SPEC_SLIDING_WINDOW
                                         : ATTN_KV_SPEC_FULL;
}

static void set_shape(struct attn_cache_spec *spec, int32_t ndim, const int64_t *shape,
                      const int32_t *order)
{
    spec->ndim = ndim;
    for (int32_t i = 0; i < ndim; i++) {
        spec->shape[i] = shape[i];
        spec->stride_order[i] = order[i];
    }
}

static bool has_two_dtypes(const attn_layer *layer)
{
    return kv_dtype_of(layer->desc, true) != layer->desc->kv_dtype;
}

/* Rows of K and V of different sizes, and scales, have no common tensor: a block is then one page
 * of bytes. */
static bool has_whole_pages(const attn_layer *layer)
{
    const struct attn_layer_desc *l = layer->desc;
    const struct attn_cache_spec *spec = &layer->spec;
    const struct kv_row k = layer_row(l, false), v = layer_row(l, true);
    return has_two_dtypes(layer) || k.bytes != v.bytes || k.scale > 0 || v.scale > 0 ||
           kv_rows_are_whole(l->kv_dtype) || spec->padded_page_bytes != spec->page_bytes ||
           spec->layout == ATTN_KV_LAYOUT_PACKED_K;
}

/* Bytes from one of the kernel's blocks to the next. */
static int64_t kernel_page(const attn_layer *layer)
{
    return layer->spec.padded_page_bytes / layer_parts(layer, 0);
}

/* Bytes of K's or V's rows in a kernel's block. Next to rows of another dtype, and where rows are
 * opaque, they end where float32 may follow. */
static int64_t plane_bytes(const attn_layer *layer, bool value)
{
    const struct attn_layer_desc *l = layer->desc;
    const int64_t bytes =
        (int64_t)layer->spec.kernel_block_size * l->num_kv_heads * layer_row(l, value).bytes;
    if (value && layer->selected->is_latent) {
        return 0; /* it has no V */
    }
    return has_two_dtypes(layer) || kv_is_opaque(l->kv_dtype) ? (bytes + 3) / 4 * 4 : bytes;
}

/* Logical dimensions are those that engines name; the order says where each lies in memory. */
static void set_paged_shape(attn_layer *layer)
{
    struct attn_cache_spec *spec = &layer->spec;
    int64_t b = spec->kernel_block_size, h = spec->num_heads, d = spec->head_size;
    static const int32_t straight[] = {0, 1, 2, 3, 4};
    static const int32_t hnd[] = {0, 1, 3, 2, 4};
    static const int32_t heads_first[] = {0, 2, 1, 3};
    const bool one_page = spec->layout == ATTN_KV_LAYOUT_LATENT || layer->selected->has_states ||
                          layer_has_vendor_pages(layer);
    if (one_page || has_whole_pages(layer)) {
        set_shape(spec, 2, (const int64_t[]){-1, kernel_page(layer)}, straight);
        return;
    }
    switch (spec->layout) {
    case ATTN_KV_LAYOUT_NHD:
    case ATTN_KV_LAYOUT_HND:
        set_shape(spec, 5, (const int64_t[]){2, -1, b, h, d},
                  spec->layout == ATTN_KV_LAYOUT_HND ? hnd : straight);
        break;
    case ATTN_KV_LAYOUT_HND_ROWS:
        set_shape(spec, 4, (const int64_t[]){-1, b, h, d + layer->desc->head_size_v}, heads_first);
        break;
    default:
        set_shape(spec, 5, (const int64_t[]){-1, 2, b, h, d},
                  spec->layout == ATTN_KV_LAYOUT_HND_INNER ? hnd : straight);
    }
}

/* Bytes of a kernel's block in the vendor's layout. */
static attn_status ask_page(const attn_layer *layer, int32_t layout, int64_t *bytes,
                            struct attn_error *error)
{
    const struct instance *instance = layer->served[ATTN_PHASE_DECODE].instance;
    const struct attn_supports_args args = ABI_ARGS(.caps = instance->caps, .layer = layer->desc,
                                                    .phase = ATTN_PHASE_DECODE, .layout = layout);
    struct attn_error why = ATTN_ERROR_INIT;
    *bytes = 0;
    ERROR_IF(instance->plugin->page_bytes == NULL, ATTN_ERROR_PLUGIN, "page_bytes",
             "layer '%s': %s has layout %#x and no page_bytes", layer->desc->name,
             instance->caps->name, (unsigned)layout);
    TRY(error_relay(error, instance->plugin->page_bytes(&args, bytes, &why), &why));
    ERROR_IF(*bytes <= 0 || *bytes > MAX_PAGE, ATTN_ERROR_PLUGIN, "page_bytes",
             "layer '%s': %s says %lld bytes of a block in layout %#x; 1 to %lld",
             layer->desc->name, instance->caps->name, (long long)*bytes, (unsigned)layout,
             (long long)MAX_PAGE);
    return ATTN_OK;
}

attn_status layer_make_spec(attn_layer *layer, int32_t layout, struct attn_error *error)
{
    const struct attn_layer_desc *l = layer->desc;
    const struct layer *selected = layer->selected;
    const int32_t rows = l->block_size / selected->tokens_per_row;
    struct attn_cache_spec *spec = &layer->spec;
    *spec = (struct attn_cache_spec){.struct_size = sizeof *spec,
                                     .role = selected->indexer != NULL      ? ATTN_CACHE_INDEX_K
                                             : selected->compressor != NULL ? ATTN_CACHE_EXTRA
                                             : selected->is_latent          ? ATTN_CACHE_LATENT
                                                                            : ATTN_CACHE_K,
                                     .kind = spec_kind(selected),
                                     .kv_dtype = l->kv_dtype,
                                     .layout = selected->is_latent ? ATTN_KV_LAYOUT_LATENT : layout,
                                     .block_size = rows * selected->blocks_per_entry,
                                     .kernel_block_size = rows,
                                     .tokens_per_row = selected->tokens_per_row,
                                     .num_heads = l->num_kv_heads,
                                     .head_size = l->head_size,
                                     .sliding_window = l->has_window ? l->window_left + 1 : 0,
                                     .chunk_size = l->chunk_size,
                                     .sink_len = l->sink_len,
                                     .alignment = ALIGNMENT};
    if (spec->kind == ATTN_KV_SPEC_NONE) {
        spec->layout = layout;
        spec->block_size = spec->kernel_block_size = 0;
        return ATTN_OK;
    }
    const int64_t slots = (int64_t)spec->block_size * spec->num_heads;
    const struct kv_row k = layer_row(l, false), v = layer_row(l, true);
    if (selected->is_latent) {
        spec->page_bytes = slots * (k.bytes + k.apart);
    } else if (selected->has_states) { /* one page is all of a slot's state */
        spec->page_bytes = selected->state_bytes;
        spec->block_size = spec->kernel_block_size = 1;
    } else if (layer_has_vendor_pages(layer)) {
        TRY(ask_page(layer, layout, &spec->page_bytes, error));
        spec->page_bytes *= layer_parts(layer, 0);
    } else {
        spec->page_bytes =
            (plane_bytes(layer, false) + plane_bytes(layer, true)) * layer_parts(layer, 0) +
            slots * (k.apart + v.apart);
    }
    spec->padded_page_bytes =
        l->padded_page_bytes > spec->page_bytes ? l->padded_page_bytes : spec->page_bytes;
    set_paged_shape(layer);
    return ATTN_OK;
}

/* K's or V's view in a layout, of the kernel's blocks. Scales that stand apart follow the rows of a
 * page: K's, then V's. */
static struct attn_kv_view make_view(const attn_layer *layer, int32_t layout, bool value,
                                     uint8_t *base, int64_t num_blocks)
{
    const struct attn_layer_desc *l = layer->desc;
    const struct kv_row rows[] = {layer_row(l, false), layer_row(l, true)};
    const int64_t b = layer->spec.kernel_block_size, h = l->num_kv_heads, mine = rows[value].bytes;
    const int64_t plane = plane_bytes(layer, false); /* K of one block */
    const bool split = layout == ATTN_KV_LAYOUT_NHD || layout == ATTN_KV_LAYOUT_HND;
    const bool hnd = layout == ATTN_KV_LAYOUT_HND || layout == ATTN_KV_LAYOUT_HND_INNER;
    int64_t before = 0; /* where V's part begins after K's */
    struct attn_kv_view view = {.struct_size = sizeof view,
                                .num_blocks = num_blocks,
                                .block_size = (int32_t)b,
                                .num_heads = (int32_t)h,
                                .head_size = value ? l->head_size_v : l->head_size,
                                .stride_block = kernel_page(layer),
                                .stride_slot = hnd ? mine : h * mine,
                                .stride_head = hnd ? b * mine : mine,
                                .device = layer->model->device};
    if (layout >= ATTN_VENDOR_CODE) { /* the page alone */
        view.stride_slot = view.stride_head = 0;
    } else if (split) { /* all keys, then all values */
        view.stride_block = b * h * mine;
        before = value ? num_blocks * plane : 0;
    } else { /* both in one page */
        before = value ? plane : 0;
    }
    if (layout == ATTN_KV_LAYOUT_HND_ROWS) {
        view.stride_slot = rows[0].bytes + rows[1].bytes;
        view.stride_head = b * (rows[0].bytes + rows[1].bytes);
        before = value ? rows[0].bytes : 0;
    } else if (layout == ATTN_KV_LAYOUT_PACKED_K && !value) {
        int64_t element = rows[0].bytes / l->head_size;
        view.pack = element > 0 && l->head_size % (16 / element) == 0 ? (int32_t)(16 / element) : 8;
        view.stride_slot = view.pack * element;
        view.stride_pack = b * view.pack * element;
        view.stride_head = b * rows[0].bytes;
    }
    view.data = base + before;
    if (layout < ATTN_VENDOR_CODE) {
        const int64_t before_scales =
            plane + plane_bytes(layer, true) + (value ? b * h * rows[0].apart : 0);
        view_set_scales(&view, &rows[value], base + before_scales, kernel_page(layer));
    }
    return view;
}

void view_set_scales(struct attn_kv_view *view, const struct kv_row *row, uint8_t *apart,
                     int64_t stride)
{
    const bool in_row = row->apart == 0, by_head = view->stride_head > view->stride_slot;
    if (row->scale > 0) {
        view->scale = in_row ? (uint8_t *)view->data + row->data : apart;
        view->scale_stride_block = in_row ? view->stride_block : stride;
        view->scale_stride_slot = in_row    ? view->stride_slot
                                  : by_head ? row->scale
                                            : row->scale * view->num_heads;
        view->scale_stride_head = in_row    ? view->stride_head
                                  : by_head ? row->scale * view->block_size
                                            : row->scale;
    }
}

attn_status layer_kv_views(const attn_layer *layer, void *base, int64_t num_blocks,
                           struct attn_kv_view *k, struct attn_kv_view *v, struct attn_error *error)
{
    const struct attn_cache_spec *spec = &layer->spec;
    BAD_IF(base == NULL || num_blocks <= 0, "num_blocks",
           "layer '%s': %lld blocks at %p; an address and at least 1", layer->desc->name,
           (long long)num_blocks, base);
    ERROR_IF(num_blocks > MAX_CACHE / spec->padded_page_bytes, ATTN_ERROR_LIMIT, "num_blocks",
             "layer '%s': %lld blocks of %lld bytes; together at most 2^%d bytes",
             layer->desc->name, (long long)num_blocks, (long long)spec->padded_page_bytes,
             MAX_CACHE_BITS);
    BAD_IF((uintptr_t)base % (uintptr_t)spec->alignment != 0, "base",
           "%p is not a multiple of %d bytes", base, spec->alignment);
    int32_t layout = spec->layout;
    if (layout == ATTN_KV_LAYOUT_LATENT) { /* rows of one head, scales after those of a block */
        layout = ATTN_KV_LAYOUT_NHD_INNER;
    } else if (has_whole_pages(layer) && layout <= ATTN_KV_LAYOUT_HND) {
        layout += ATTN_KV_LAYOUT_NHD_INNER;
    } else if (has_two_dtypes(layer) && layout == ATTN_KV_LAYOUT_HND_ROWS) {
        layout = ATTN_KV_LAYOUT_HND_INNER;
    }
    num_blocks *= layer_parts(layer, 0);
    *k = make_view(layer, layout, false, base, num_blocks);
    if (v != NULL) {
        *v = make_view(layer, layout, true, base, num_blocks);
    }
    return ATTN_OK;
}
