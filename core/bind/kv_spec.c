/* SPDX-License-Identifier: Apache-2.0 */
/* What a layer's cache is made of: page bytes, shape and stride order of the layout that its
 * backend would like. */
#include "bind/bound.h"
#include "select/match.h"
#include "select/names.h"
#include "util/structs.h"

#define ALIGNMENT 256
#define MAX_PAGE ((int64_t)1 << 48) /* as of padded_page_bytes */

int64_t kv_row_bytes(int32_t kv_dtype, int32_t head_size, bool value)
{
    switch (kv_dtype) {
    case ATTN_KV_F32:
        return 4 * (int64_t)head_size;
    case ATTN_KV_F16:
    case ATTN_KV_BF16:
        return 2 * (int64_t)head_size;
    case ATTN_KV_INT8_K:
        return (value ? 2 : 1) * (int64_t)head_size;
    case ATTN_KV_INT4_PER_TOKEN_HEAD:
        return head_size / 2;
    case ATTN_KV_NVFP4:
        return head_size / 2 + head_size / 16;
    case ATTN_KV_FP8_DS_MLA:
        return 656;
    /* TurboQuant: a 16-bit norm behind rotated keys, a 16-bit scale and zero behind values */
    case ATTN_KV_TURBOQUANT_K8V4:
        return value ? head_size / 2 + 4 : head_size;
    case ATTN_KV_TURBOQUANT_4BIT_NC:
        return head_size / 2 + (value ? 4 : 2);
    case ATTN_KV_TURBOQUANT_K3V4_NC:
        return value ? head_size / 2 + 4 : head_size * 3 / 8 + 2;
    case ATTN_KV_TURBOQUANT_3BIT_NC:
        return head_size * 3 / 8 + (value ? 4 : 2);
    case ATTN_KV_Q8_0: /* blocks of 32 elements with a 16-bit step in front */
        return (int64_t)(head_size / 32) * 34;
    case ATTN_KV_Q4_0:
        return (int64_t)(head_size / 32) * 18;
    default:
        return head_size;
    }
}

int64_t kv_scale_bytes(int32_t kv_dtype, int32_t head_size, bool value)
{
    switch (kv_dtype) {
    case ATTN_KV_FP8_PER_TOKEN_HEAD:
    case ATTN_KV_INT8_PER_TOKEN_HEAD:
    case ATTN_KV_INT4_PER_TOKEN_HEAD:
        return sizeof(float);
    case ATTN_KV_INT8_KV:
    case ATTN_KV_INT8_K:
        return value ? 0 : sizeof(float); /* keys only */
    case ATTN_KV_NVFP4:
        return head_size / 16;
    case ATTN_KV_TURBOQUANT_K8V4:
        return value ? 4 : 0;
    case ATTN_KV_TURBOQUANT_4BIT_NC:
    case ATTN_KV_TURBOQUANT_K3V4_NC:
    case ATTN_KV_TURBOQUANT_3BIT_NC:
        return value ? 4 : 2;
    default:
        return 0;
    }
}

bool kv_scales_in_row(int32_t kv_dtype)
{
    return kv_dtype == ATTN_KV_NVFP4 ||
           (kv_dtype >= ATTN_KV_TURBOQUANT_K8V4 && kv_dtype <= ATTN_KV_TURBOQUANT_3BIT_NC);
}

int64_t kv_scales_apart(int32_t kv_dtype, bool value)
{
    return kv_scales_in_row(kv_dtype) ? 0 : kv_scale_bytes(kv_dtype, 0, value);
}

int64_t layer_row_bytes(const struct attn_layer_desc *l, bool value)
{
    return kv_is_opaque(kv_dtype_of(l, value))
               ? (value ? l->kv_row_bytes_v : l->kv_row_bytes)
               : kv_row_bytes(kv_dtype_of(l, value), value ? l->head_size_v : l->head_size, value);
}

int64_t layer_scale_bytes(const struct attn_layer_desc *l, bool value)
{
    return kv_is_opaque(kv_dtype_of(l, value))
               ? (value ? l->kv_scale_bytes_v : l->kv_scale_bytes)
               : kv_scale_bytes(kv_dtype_of(l, value), value ? l->head_size_v : l->head_size,
                                value);
}

int64_t layer_scales_apart(const struct attn_layer_desc *l, bool value)
{
    return kv_scales_in_row(kv_dtype_of(l, value)) ? 0 : layer_scale_bytes(l, value);
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

static void set_shape(struct kv_page *spec, int32_t ndim, const int64_t *shape,
                      const int32_t *order)
{
    spec->ndim = ndim;
    for (int32_t i = 0; i < ndim; i++) {
        spec->shape[i] = shape[i];
        spec->stride_order[i] = order[i];
    }
}

/* Rows of K and V of different sizes, and scales, have no common tensor: a block is then one page
 * of bytes. */
static bool has_whole_pages(const struct kv_page *spec)
{
    return spec->kv_dtype_v != spec->kv_dtype || spec->row_bytes[0] != spec->row_bytes[1] ||
           spec->scales_apart[0] > 0 || spec->scales_apart[1] > 0 ||
           kv_rows_are_whole(spec->kv_dtype) || kv_scales_in_row(spec->kv_dtype) ||
           spec->padded_page_bytes != spec->page_bytes || spec->layout == ATTN_KV_LAYOUT_PACKED_K;
}

/* Bytes between the kernel's blocks. */
static int64_t kernel_page(const struct kv_page *spec)
{
    return spec->padded_page_bytes / (spec->block_size / spec->kernel_block_size);
}

/* Bytes of K's or V's rows in a kernel's block. Next to rows of another dtype, and where rows are
 * opaque, they end where float32 may follow. */
static int64_t plane_bytes(const struct kv_page *s, bool value)
{
    const int64_t bytes = (int64_t)s->kernel_block_size * s->num_kv_heads * s->row_bytes[value];
    return s->kv_dtype_v != s->kv_dtype || kv_is_opaque(s->kv_dtype) ? (bytes + 3) / 4 * 4 : bytes;
}

/* Logical dimensions are those that engines name; the order says where each lies in memory. */
static void set_paged_shape(struct kv_page *spec)
{
    int64_t b = spec->kernel_block_size, h = spec->num_kv_heads, d = spec->head_size;
    static const int32_t straight[] = {0, 1, 2, 3, 4};
    static const int32_t hnd[] = {0, 1, 3, 2, 4};
    static const int32_t heads_first[] = {0, 2, 1, 3};
    if (has_whole_pages(spec)) {
        set_shape(spec, 2, (const int64_t[]){-1, kernel_page(spec)}, straight);
        return;
    }
    switch (spec->layout) {
    case ATTN_KV_LAYOUT_NHD:
    case ATTN_KV_LAYOUT_HND:
        set_shape(spec, 5, (const int64_t[]){2, -1, b, h, d},
                  spec->layout == ATTN_KV_LAYOUT_HND ? hnd : straight);
        break;
    case ATTN_KV_LAYOUT_HND_ROWS:
        set_shape(spec, 4, (const int64_t[]){-1, b, h, d + spec->head_size_v}, heads_first);
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
    const struct attn_supports_args args = {.struct_size = sizeof args,
                                            .caps = instance->caps,
                                            .layer = layer->desc,
                                            .phase = ATTN_PHASE_DECODE,
                                            .layout = layout};
    struct attn_error why = ATTN_ERROR_INIT;
    *bytes = 0;
    if (instance->plugin->page_bytes == NULL) {
        return error_set(error, ATTN_ERROR_PLUGIN, "page_bytes",
                         "layer '%s': %s has layout %#x and no page_bytes", layer->desc->name,
                         instance->caps->name, (unsigned)layout);
    }
    TRY(error_relay(error, instance->plugin->page_bytes(&args, bytes, &why), &why));
    return *bytes > 0 && *bytes <= MAX_PAGE
               ? ATTN_OK
               : error_set(error, ATTN_ERROR_PLUGIN, "page_bytes",
                           "layer '%s': %s says %lld bytes of a block in layout %#x; 1 to %lld",
                           layer->desc->name, instance->caps->name, (long long)*bytes,
                           (unsigned)layout, (long long)MAX_PAGE);
}

attn_status layer_make_spec(attn_layer *layer, int32_t layout, struct attn_error *error)
{
    const struct attn_layer_desc *l = layer->desc;
    const int32_t rows = l->block_size / layer->selected->tokens_per_row;
    struct kv_page *spec = &layer->spec;
    *spec = (struct kv_page){.kind = spec_kind(layer->selected),
                             .kv_dtype = l->kv_dtype,
                             .kv_dtype_v = kv_dtype_of(l, true),
                             .layout = layout,
                             .block_size = rows * layer->selected->blocks_per_entry,
                             .kernel_block_size = rows,
                             .num_kv_heads = l->num_kv_heads,
                             .head_size = l->head_size,
                             .head_size_v = l->head_size_v,
                             .sliding_window = l->has_window ? l->window_left + 1 : 0,
                             .chunk_size = l->chunk_size,
                             .sink_len = l->sink_len,
                             .alignment = ALIGNMENT};
    for (int32_t i = 0; i < 2; i++) {
        spec->row_bytes[i] = layer_row_bytes(l, i == 1);
        spec->scales_apart[i] = layer_scales_apart(l, i == 1);
    }
    if (spec->kind == ATTN_KV_SPEC_NONE) {
        spec->block_size = spec->kernel_block_size = 0;
        return ATTN_OK;
    }
    const bool is_latent = layer->selected->is_latent, has_states = layer->selected->has_states;
    const bool vendors = layer_has_vendor_pages(layer);
    if (is_latent) {
        spec->layout = ATTN_KV_LAYOUT_LATENT;
        spec->row_bytes[1] = spec->scales_apart[1] = 0;
        spec->page_bytes = spec->block_size * (spec->row_bytes[0] + spec->scales_apart[0]);
    } else if (has_states) { /* one page is all of a slot's state */
        spec->page_bytes = layer->selected->state_bytes;
        spec->block_size = spec->kernel_block_size = 1;
    } else if (vendors) {
        TRY(ask_page(layer, layout, &spec->page_bytes, error));
        spec->page_bytes *= spec->block_size / spec->kernel_block_size;
    } else {
        const int64_t scales = spec->scales_apart[0] + spec->scales_apart[1];
        spec->page_bytes = (plane_bytes(spec, false) + plane_bytes(spec, true)) *
                               (spec->block_size / spec->kernel_block_size) +
                           (int64_t)spec->block_size * spec->num_kv_heads * scales;
    }
    spec->padded_page_bytes =
        l->padded_page_bytes > spec->page_bytes ? l->padded_page_bytes : spec->page_bytes;
    if (is_latent || has_states || vendors) { /* a block is one page of bytes */
        static const int32_t straight[] = {0, 1};
        set_shape(spec, 2, (const int64_t[]){-1, kernel_page(spec)}, straight);
    } else {
        set_paged_shape(spec);
    }
    return ATTN_OK;
}

/* K's or V's view, of the kernel's blocks; `before` is where V's part begins behind K's. */
static void make_view(const struct kv_page *s, bool value, uint8_t *base, int64_t num_blocks,
                      struct attn_kv_view *view)
{
    const int64_t *row = s->row_bytes;
    int64_t b = s->kernel_block_size, h = s->num_kv_heads, mine = row[value];
    int64_t plane = plane_bytes(s, false); /* K of one block */
    bool split = s->layout == ATTN_KV_LAYOUT_NHD || s->layout == ATTN_KV_LAYOUT_HND;
    bool hnd = s->layout == ATTN_KV_LAYOUT_HND || s->layout == ATTN_KV_LAYOUT_HND_INNER;
    int64_t before = 0;
    *view = (struct attn_kv_view){.struct_size = sizeof *view,
                                  .num_blocks = num_blocks,
                                  .block_size = (int32_t)b,
                                  .num_heads = (int32_t)h,
                                  .head_size = value ? s->head_size_v : s->head_size,
                                  .stride_slot = hnd ? mine : h * mine,
                                  .stride_head = hnd ? b * mine : mine};
    if (s->layout >= ATTN_VENDOR_CODE) { /* the page alone */
        view->stride_block = kernel_page(s);
        view->stride_slot = view->stride_head = 0;
    } else if (split) { /* all keys, then all values */
        view->stride_block = b * h * mine;
        before = value ? num_blocks * plane : 0;
    } else { /* both in one page */
        view->stride_block = kernel_page(s);
        before = value ? plane : 0;
    }
    if (s->layout == ATTN_KV_LAYOUT_HND_ROWS) {
        view->stride_slot = row[0] + row[1];
        view->stride_head = b * (row[0] + row[1]);
        before = value ? row[0] : 0;
    } else if (s->layout == ATTN_KV_LAYOUT_PACKED_K && !value) {
        int64_t element = row[0] / s->head_size;
        view->pack =
            element > 0 && s->head_size % (16 / element) == 0 ? (int32_t)(16 / element) : 8;
        view->stride_slot = view->pack * element;
        view->stride_pack = b * view->pack * element;
        view->stride_head = b * row[0];
    }
    view->data = base + before;
}

/* Scales follow the rows of a page: K's, then V's, float32 each or as many bytes as the layer
 * says, [B, Hk] or, where a head's rows lie together, [Hk, B]. NVFP4's and TurboQuant's stand
 * behind each row. */
static void add_scales(const struct kv_page *s, uint8_t *base, bool value,
                       struct attn_kv_view *view)
{
    bool by_head = view->stride_head > view->stride_slot;
    int64_t count = (int64_t)s->kernel_block_size * s->num_kv_heads;
    int64_t rows = plane_bytes(s, false) + plane_bytes(s, true);
    const int32_t dtype = value ? s->kv_dtype_v : s->kv_dtype;
    const int64_t apart = s->scales_apart[value];
    if (kv_scales_in_row(dtype)) {
        const int64_t mine = kv_scale_bytes(dtype, view->head_size, value);
        if (mine > 0) {
            view->scale = (uint8_t *)view->data + s->row_bytes[value] - mine;
            view->scale_stride_block = view->stride_block;
            view->scale_stride_slot = view->stride_slot;
            view->scale_stride_head = view->stride_head;
        }
        return;
    }
    if (apart == 0 || s->layout >= ATTN_VENDOR_CODE) {
        return;
    }
    view->scale = base + rows + (value ? count * s->scales_apart[0] : 0);
    view->scale_stride_block = kernel_page(s);
    view->scale_stride_slot = by_head ? apart : apart * s->num_kv_heads;
    view->scale_stride_head = by_head ? apart * s->kernel_block_size : apart;
}

attn_status layer_kv_views(const attn_layer *layer, void *base, int64_t num_blocks,
                           struct attn_kv_view *k, struct attn_kv_view *v, struct attn_error *error)
{
    struct attn_kv_view views[2];
    if (layer == NULL || base == NULL || k == NULL || num_blocks <= 0) {
        return BAD("num_blocks",
                   "layer %p, base %p, k %p, %lld blocks; none may be NULL and 1 block is the "
                   "least",
                   (const void *)layer, base, (void *)k, (long long)num_blocks);
    }
    struct kv_page spec = layer->spec;
    if (spec.kind == ATTN_KV_SPEC_NONE || spec.kind == ATTN_KV_SPEC_STATE) {
        return BAD("layer", "layer '%s' has no cache of keys and values", layer->desc->name);
    }
    if (num_blocks > MAX_CACHE / spec.padded_page_bytes) {
        return error_set(error, ATTN_ERROR_LIMIT, "num_blocks",
                         "layer '%s': %lld blocks of %lld bytes; together at most 2^%d bytes",
                         layer->desc->name, (long long)num_blocks,
                         (long long)spec.padded_page_bytes, MAX_CACHE_BITS);
    }
    if ((uintptr_t)base % (uintptr_t)spec.alignment != 0) {
        return BAD("base", "%p is not a multiple of %d bytes", base, spec.alignment);
    }
    if (has_whole_pages(&spec) && spec.layout <= ATTN_KV_LAYOUT_HND) {
        spec.layout += ATTN_KV_LAYOUT_NHD_INNER;
    } else if (spec.kv_dtype_v != spec.kv_dtype && spec.layout == ATTN_KV_LAYOUT_HND_ROWS) {
        spec.layout = ATTN_KV_LAYOUT_HND_INNER;
    }
    num_blocks *= spec.block_size / spec.kernel_block_size;
    for (int32_t i = 0; i < 2; i++) {
        make_view(&spec, i == 1, base, num_blocks, &views[i]);
        views[i].device = layer->model->device;
        add_scales(&spec, base, i == 1, &views[i]);
    }
    if (spec.layout == ATTN_KV_LAYOUT_LATENT) {
        views[0].num_heads = 1;
        views[0].stride_block = kernel_page(&spec);
        views[0].stride_slot = spec.row_bytes[0];
        views[0].stride_head = views[0].stride_slot;
    }
    *k = views[0];
    if (v != NULL) {
        *v = views[1];
    }
    return ATTN_OK;
}
