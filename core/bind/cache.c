/* SPDX-License-Identifier: Apache-2.0 */
/* Memory handed in: caches, states and parameters, checked before anything is kept. */
#include <string.h>

#include "bind/bound.h"
#include "bind/model.h"
#include "select/layer_check.h"
#include "select/match.h"
#include "select/names.h"
#include "util/structs.h"

#define MIN_VIEW 112 /* sizes in ABI 0.1 */
#define MIN_STATE 64
#define MIN_PARAMS 96
#define BAD(field, ...) error_set(error, ATTN_ERROR_INVALID_ARGUMENT, field, __VA_ARGS__)

/* One dimension of a view, for finding overlaps. */
struct extent {
    int64_t count;
    int64_t stride;
};

/* Dimensions sorted by stride: each must begin behind the end of the smaller ones. */
static bool overlaps(struct extent *e, int32_t count, int64_t row_bytes)
{
    int64_t reach = row_bytes;
    for (int32_t i = 1; i < count; i++) {
        for (int32_t j = i; j > 0 && e[j].stride < e[j - 1].stride; j--) {
            struct extent swapped = e[j];
            e[j] = e[j - 1];
            e[j - 1] = swapped;
        }
    }
    for (int32_t i = 0; i < count; i++) {
        if (e[i].count <= 1) {
            continue;
        }
        if (e[i].stride < reach) {
            return true;
        }
        reach = e[i].stride * (e[i].count - 1) + reach;
    }
    return false;
}

static attn_status check_view(const attn_layer *layer, const struct attn_kv_view *view, bool value,
                              struct attn_error *error)
{
    const char *name = layer->layer.desc.name, *which = value ? "v" : "k";
    const struct attn_layer_desc *l = &layer->layer.desc;
    int32_t head_size = value ? l->head_size_v : l->head_size;
    int64_t row = kv_row_bytes(l->kv_dtype, head_size, value);
    if (l->kv_dtype == ATTN_KV_NVFP4) {
        row = head_size / 2; /* block scales have a place of their own, behind the row or apart */
    }
    int32_t pack = view->pack > 0 ? view->pack : head_size;
    if (view->data == NULL || view->num_blocks <= 0) {
        return BAD("data", "layer '%s', %s: data %p, %lld blocks; an address and at least 1 block",
                   name, which, view->data, (long long)view->num_blocks);
    }
    if (view->num_heads != l->num_kv_heads || view->head_size != head_size ||
        view->block_size != l->block_size) {
        return BAD(
            "num_heads",
            "layer '%s', %s: %d heads of %d in blocks of %d; the layer has %d heads of %d in "
            "blocks of %d",
            name, which, view->num_heads, view->head_size, view->block_size, l->num_kv_heads,
            head_size, l->block_size);
    }
    if (view->pack < 0 || head_size % pack != 0) {
        return BAD("pack", "layer '%s', %s: pack is %d; it must divide %d", name, which, view->pack,
                   head_size);
    }
    if (view->stride_block <= 0 || view->stride_slot <= 0 || view->stride_head <= 0) {
        return BAD("stride_block", "layer '%s', %s: strides %lld, %lld, %lld; all must be above 0",
                   name, which, (long long)view->stride_block, (long long)view->stride_slot,
                   (long long)view->stride_head);
    }
    struct extent extents[4] = {{view->num_blocks, view->stride_block},
                                {view->block_size, view->stride_slot},
                                {view->num_heads, view->stride_head},
                                {head_size / pack, view->stride_pack}};
    bool packed = pack < head_size;
    if (overlaps(extents, packed ? 4 : 3, packed ? row / head_size * pack : row)) {
        return BAD("stride_slot",
                   "layer '%s', %s: strides (block %lld, slot %lld, head %lld, pack %lld bytes) "
                   "make rows of %lld bytes overlap",
                   name, which, (long long)view->stride_block, (long long)view->stride_slot,
                   (long long)view->stride_head, (long long)view->stride_pack, (long long)row);
    }
    return ATTN_OK;
}

static attn_status check_walk(const attn_layer *layer, const struct attn_kv_view *view, bool value,
                              struct attn_error *error)
{
    const char *name = layer->layer.desc.name, *which = value ? "v" : "k";
    bool packed = view->pack > 0 && view->pack < view->head_size;
    bool nhd = view->stride_slot >= view->stride_head;
    uint64_t walk = layer->layer.mla != NULL ? ATTN_WALK_LATENT
                    : nhd                    ? ATTN_WALK_NHD
                                             : ATTN_WALK_HND;
    walk |= packed ? ATTN_WALK_PACKED : 0;
    if (view->num_heads == 1 || view->block_size == 1) { /* both orders are the same */
        walk &= ~(ATTN_WALK_NHD | ATTN_WALK_HND);
    }
    for (int32_t phase = 0; phase < ATTN_PHASE_COUNT; phase++) {
        const struct attn_backend_caps *caps = layer->served[phase].instance->caps;
        if ((caps->walks & walk) != walk) {
            return error_set(error, ATTN_ERROR_UNSUPPORTED, "walks",
                             "layer '%s', %s: the view is %s%s, and %s for %s does not walk it",
                             name, which, nhd ? "nhd" : "hnd", packed ? ", packed" : "", caps->name,
                             name_of_phase(phase));
        }
        if (caps->kv_alignment > 1 && ((uintptr_t)view->data % (uintptr_t)caps->kv_alignment != 0 ||
                                       view->stride_block % caps->kv_alignment != 0 ||
                                       view->stride_slot % caps->kv_alignment != 0 ||
                                       view->stride_head % caps->kv_alignment != 0)) {
            return BAD("data",
                       "layer '%s', %s: address %p or a stride is not a multiple of %d bytes, "
                       "which %s needs",
                       name, which, view->data, caps->kv_alignment, caps->name);
        }
    }
    return ATTN_OK;
}

attn_status layer_bind_kv(attn_layer *layer, const struct attn_kv_view *k,
                          const struct attn_kv_view *v, struct attn_error *error)
{
    struct attn_kv_view views[2];
    if (layer == NULL) {
        return BAD("layer", "layer is NULL");
    }
    if (layer->spec.kind == ATTN_KV_SPEC_NONE || layer->spec.kind == ATTN_KV_SPEC_GDN_STATE) {
        return BAD("layer", "layer '%s' takes no cache: %s", layer->layer.desc.name,
                   layer->layer.sharing_target >= 0 ? "it reads that of its kv_sharing_target"
                                                    : "its kind has none");
    }
    bool latent = layer->layer.mla != NULL;
    if (k == NULL || (v == NULL) != latent) {
        return BAD("v", "layer '%s': k %p, v %p; %s", layer->layer.desc.name, (const void *)k,
                   (const void *)v, latent ? "an MLA layer has k only" : "both are needed");
    }
    attn_status status =
        struct_read(&views[0], sizeof views[0], MIN_VIEW, k, "attn_kv_view", error);
    if (status == ATTN_OK && v != NULL) {
        status = struct_read(&views[1], sizeof views[1], MIN_VIEW, v, "attn_kv_view", error);
    }
    for (int32_t i = 0; i < (latent ? 1 : 2) && status == ATTN_OK; i++) {
        status = check_view(layer, &views[i], i == 1, error);
        status = status == ATTN_OK ? check_walk(layer, &views[i], i == 1, error) : status;
    }
    if (status == ATTN_OK && !latent && views[0].num_blocks != views[1].num_blocks) {
        status = BAD("num_blocks", "layer '%s': k has %lld blocks, v %lld", layer->layer.desc.name,
                     (long long)views[0].num_blocks, (long long)views[1].num_blocks);
    }
    if (status == ATTN_OK) {
        layer->k_cache = views[0];
        layer->has_v_cache = !latent;
        if (!latent) {
            layer->v_cache = views[1];
        }
    }
    return status;
}

/* State as two views, see gdn.h: kernels take all memory alike. */
attn_status layer_bind_state(attn_layer *layer, const struct attn_gdn_state *state,
                             struct attn_error *error)
{
    struct attn_gdn_state read;
    if (layer == NULL || layer->layer.gdn == NULL) {
        return BAD("layer", "only a gdn layer takes a state");
    }
    const struct attn_gdn_desc *g = layer->layer.gdn;
    attn_status status = struct_read(&read, sizeof read, MIN_STATE, state, "attn_gdn_state", error);
    if (status != ATTN_OK) {
        return status;
    }
    int64_t head = (int64_t)g->head_size_v * g->head_size_k;
    int64_t element = layer->layer.desc.dtype == ATTN_DTYPE_F32 ? 4 : 2;
    int32_t channels = 2 * g->num_k_heads * g->head_size_k + g->num_v_heads * g->head_size_v;
    if (read.state == NULL || read.num_slots <= 0 ||
        read.state_stride_slot < head * g->num_v_heads ||
        (g->conv_width > 0 && read.conv_state == NULL)) {
        return BAD(
            "state",
            "layer '%s': state %p of %lld slots, %lld floats apart, conv_state %p; a state of "
            "at least %lld floats a slot%s is needed",
            layer->layer.desc.name, read.state, (long long)read.num_slots,
            (long long)read.state_stride_slot, read.conv_state, (long long)(head * g->num_v_heads),
            g->conv_width > 0 ? " and the convolution's" : "");
    }
    layer->k_cache = (struct attn_kv_view){.struct_size = sizeof layer->k_cache,
                                           .data = read.state,
                                           .num_blocks = read.num_slots,
                                           .block_size = 1,
                                           .num_heads = g->num_v_heads,
                                           .head_size = (int32_t)head,
                                           .stride_block = 4 * read.state_stride_slot,
                                           .stride_slot = 4 * head * g->num_v_heads,
                                           .stride_head = 4 * head};
    layer->has_v_cache = g->conv_width > 0;
    layer->v_cache =
        (struct attn_kv_view){.struct_size = sizeof layer->v_cache,
                              .data = read.conv_state,
                              .num_blocks = read.num_slots,
                              .block_size = 1,
                              .num_heads = channels,
                              .head_size = g->conv_width - 1 + g->num_speculative_tokens,
                              .stride_block = element * read.conv_stride_slot,
                              .stride_slot = element * read.conv_stride_slot,
                              .stride_head = element * read.conv_stride_channel};
    return ATTN_OK;
}

static attn_status check_sink(const attn_layer *layer, const struct attn_tensor *tensor, bool value,
                              struct attn_error *error)
{
    const struct attn_layer_desc *l = &layer->layer.desc;
    int32_t head_size = value ? l->head_size_v : l->head_size;
    if (tensor == NULL || tensor->ndim != 3 || tensor->shape == NULL ||
        tensor->shape[0] != l->sink_len || tensor->shape[1] != l->num_kv_heads ||
        tensor->shape[2] != head_size) {
        return BAD(value ? "sink_v" : "sink_k",
                   "layer '%s': the static sink's %s must be [%d, %d, %d]", l->name,
                   value ? "values" : "keys", l->sink_len, l->num_kv_heads, head_size);
    }
    return ATTN_OK;
}

/* A plan's prepared calls hold what kernels made of the parameters. */
static attn_status check_no_plans(attn_layer *layer, struct attn_error *error)
{
    pthread_mutex_lock(&layer->model->lock);
    int32_t plans = layer->num_plans;
    pthread_mutex_unlock(&layer->model->lock);
    return plans == 0
               ? ATTN_OK
               : error_set(error, ATTN_ERROR_ORDER, "layer_bind_params",
                           "layer '%s' is in %d plans; destroy them first, or change what the "
                           "parameters point at",
                           layer->layer.desc.name, plans);
}

attn_status layer_bind_params(attn_layer *layer, const struct attn_layer_params *params,
                              struct attn_error *error)
{
    static const uint32_t known[] = {ATTN_EXT_MLA_WEIGHTS, ATTN_EXT_GDN_WEIGHTS,
                                     ATTN_EXT_KV_QUANT_PARAMS, ATTN_EXT_MM_ENCODER_STATE};
    struct attn_layer_params read;
    if (layer == NULL) {
        return BAD("layer", "layer is NULL");
    }
    const struct attn_layer_desc *l = &layer->layer.desc;
    attn_status status =
        struct_read(&read, sizeof read, MIN_PARAMS, params, "attn_layer_params", error);
    if (status == ATTN_OK) {
        status = ext_check(read.next, known, 4, "attn_layer_params", error);
    }
    if (status == ATTN_OK && (l->has_sinks != 0) != (read.sinks != NULL)) {
        status = BAD("sinks", "layer '%s': has_sinks is %d and sinks is %p", l->name, l->has_sinks,
                     (const void *)read.sinks);
    }
    if (status == ATTN_OK && (l->alibi != ATTN_ALIBI_NONE) != (read.alibi_slopes != NULL)) {
        status = BAD("alibi_slopes", "layer '%s': alibi is %d and alibi_slopes is %p", l->name,
                     l->alibi, (const void *)read.alibi_slopes);
    }
    if (status == ATTN_OK && l->sink_len == 0) {
        read.sink_k = read.sink_v = NULL;
    } else if (status == ATTN_OK) {
        status = check_sink(layer, read.sink_k, false, error);
        status = status == ATTN_OK ? check_sink(layer, read.sink_v, true, error) : status;
    }
    if (status == ATTN_OK) {
        status = check_no_plans(layer, error);
    }
    struct kept_params *kept = &layer->kept[layer->params == &layer->kept[0]];
    status = status == ATTN_OK ? kept_params_take(kept, &read, error) : status;
    if (status == ATTN_OK && layer->layer.gdn != NULL) {
        status = gdn_check_weights(layer, &kept->params, error);
    }
    if (status == ATTN_OK && layer->layer.mla != NULL) {
        status = mla_bind_weights(layer, &kept->params, error);
    }
    if (status == ATTN_OK && layer_is_quantized_encoder(layer)) {
        status = encoder_check_state(layer, &kept->params, error);
    }
    if (status != ATTN_OK) {
        return status;
    }
    layer_release_states(layer); /* kernels may have looked at the old ones */
    layer->params = kept;
    for (int32_t part = 0; part < PART_COUNT; part++) {
        layer->part_params[part] = kept->params;
    }
    layer_rewrite_parts(layer);
    return ATTN_OK;
}
