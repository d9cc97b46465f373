/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_ref with caches that only this plugin reads: as `opaque`, rows of ATTN_KV_OPAQUE or of the
 * vendor's dtype OPAQUE_DTYPE, float32 numbers and a tail, with a tag of two bytes at each row's
 * scale; as `opaque_pages` a layout of the vendor's as well, pages with a head of their own. */
#include "backend_opaque.h"

#include <attn/plugin.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "cpu_ref_backend.h"

/* What the kernels of cpu_ref are called with. */
struct plain {
    struct attn_layer_desc layer;
    struct attn_kv_view k, v;
};

static bool is_page(const struct attn_kv_view *view)
{
    return view->stride_slot == 0;
}

/* A page is a head, then K's rows [Hk, B, D], then V's. */
static int64_t page_rows(const struct attn_kv_view *k)
{
    return (int64_t)k->num_heads * k->block_size * k->head_size * (int64_t)sizeof(float);
}

static struct attn_kv_view plain_view(const struct attn_kv_view *view, int64_t before)
{
    struct attn_kv_view own = *view;
    if (is_page(view)) {
        own.data = (uint8_t *)view->data + before;
        own.stride_slot = view->head_size * (int64_t)sizeof(float);
        own.stride_head = view->block_size * own.stride_slot;
    }
    own.scale = NULL;
    return own;
}

static struct plain make_plain(const struct attn_layer_desc *layer, const struct attn_kv_view *k,
                               const struct attn_kv_view *v)
{
    struct plain plain = {*layer, plain_view(k, OPAQUE_PAGE_HEAD),
                          plain_view(v, OPAQUE_PAGE_HEAD + page_rows(k))};
    plain.layer.kv_dtype = ATTN_KV_F32;
    return plain;
}

/* The tag of a slot's row, K's or V's: written with it, and moved with its block. */
static uint8_t *tag_of(const struct attn_kv_view *view, int64_t slot, int64_t head)
{
    return (uint8_t *)view->scale + slot / view->block_size * view->scale_stride_block +
           slot % view->block_size * view->scale_stride_slot + head * view->scale_stride_head;
}

static bool has_tags(const struct attn_attend_args *args, int32_t r, int64_t position)
{
    static const uint8_t tag[2][OPAQUE_SCALE] = {{'k', 1}, {'v', 2}};
    const struct attn_kv_view *views[] = {args->k_cache, args->v_cache};
    const struct attn_batch *b = args->batch;
    const int64_t row = b->block_table_row != NULL ? b->block_table_row[r] : r;
    const int32_t size = args->k_cache->block_size;
    const int64_t slot =
        b->block_table[row * b->block_table_stride + position / size] * (int64_t)size +
        position % size;
    for (int32_t i = 0; i < 2; i++) {
        for (int32_t h = 0; h < views[i]->num_heads; h++) {
            if (memcmp(tag_of(views[i], slot, h), tag[i], OPAQUE_SCALE) != 0) {
                return false;
            }
        }
    }
    return true;
}

static attn_status attend(const struct attn_attend_args *args, struct attn_error *error)
{
    if (args->k_cache == NULL || args->layer->kv_dtype < ATTN_KV_OPAQUE) {
        return real_kernels.attend(args, error);
    }
    const struct plain plain = make_plain(args->layer, args->k_cache, args->v_cache);
    struct attn_attend_args call = *args;
    for (int32_t r = 0; r < args->batch->num_reqs && args->k_cache->scale != NULL; r++) {
        for (int32_t i = 0; i < args->batch->seq_lens[r]; i++) {
            if (!has_tags(args, r, i)) {
                return ATTN_ERROR_PLUGIN;
            }
        }
    }
    call.layer = &plain.layer;
    call.k_cache = &plain.k;
    call.v_cache = &plain.v;
    return real_kernels.attend(&call, error);
}

static attn_status write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    if (args->layer->kv_dtype < ATTN_KV_OPAQUE) {
        return real_kernels.write_kv(args, error);
    }
    const struct plain plain = make_plain(args->layer, args->k_cache, args->v_cache);
    struct attn_write_kv_args call = *args;
    for (int64_t i = 0; i < args->num_slots && args->k_cache->scale != NULL; i++) {
        for (int32_t h = 0; h < args->k_cache->num_heads && args->slot_mapping[i] >= 0; h++) {
            memcpy(tag_of(args->k_cache, args->slot_mapping[i], h), "k\1", OPAQUE_SCALE);
            memcpy(tag_of(args->v_cache, args->slot_mapping[i], h), "v\2", OPAQUE_SCALE);
        }
    }
    call.layer = &plain.layer;
    call.k_cache = &plain.k;
    call.v_cache = &plain.v;
    return real_kernels.write_kv(&call, error);
}

static attn_status page_bytes(const struct attn_supports_args *args, int64_t *bytes,
                              struct attn_error *error)
{
    const struct attn_layer_desc *l = args->layer;
    if (args->layout != OPAQUE_LAYOUT || l->block_size == 3) { /* as a plugin that fails */
        *bytes = 0;
        return l->block_size == 3 ? ATTN_OK : ATTN_ERROR_PLUGIN;
    }
    *bytes = OPAQUE_PAGE_HEAD + (int64_t)l->num_kv_heads * l->block_size *
                                    (l->head_size + l->head_size_v) * (int64_t)sizeof(float);
    return ATTN_OK;
}

static attn_status declare_backends(const struct attn_probe_sink *sink,
                                    const struct attn_backend_caps *caps, struct attn_error *why)
{
    static const struct attn_vendor_code codes[] = {{ATTN_NAMES_KV_DTYPE, OPAQUE_DTYPE, "tagged"},
                                                    {ATTN_NAMES_KV_LAYOUT, OPAQUE_LAYOUT, "pages"}};
    struct attn_backend_caps renamed = *caps;
    renamed.name = "opaque";
    renamed.kv_dtypes |= 1u << ATTN_KV_OPAQUE;
    renamed.vendor_codes = codes;
    renamed.num_vendor_codes = 1;
    renamed.vendor_code_stride = sizeof *codes;
    renamed.features &= ~(ATTN_FEATURE_FUSED_WRITE | ATTN_FEATURE_KV_DTYPE_V);
    renamed.decode_write_kv_dtypes = 0;
    renamed.rank[0] = renamed.rank[1] = -1;
    attn_status status = sink->backend(sink->user, &renamed, why);
    renamed.name = "opaque_pages";
    renamed.num_vendor_codes = 2;
    renamed.preferred_layout = OPAQUE_LAYOUT;
    return status == ATTN_OK ? sink->backend(sink->user, &renamed, why) : status;
}

static void change_kernels(struct attn_kernels *kernels)
{
    kernels->attend = attend;
    kernels->write_kv = write_kv;
}

CPU_REF_BACKEND("opaque", create, page_bytes)
