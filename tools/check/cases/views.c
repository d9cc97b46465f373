/* SPDX-License-Identifier: Apache-2.0 */
/* Where the rows and scales of a cache lie. */
#include "cases/cases.h"

#define PACK_BYTES 16 /* size of the inner pack: [N, Hk, D/x, B, x] */

static int64_t row_bytes(const struct factor_value *v, bool value)
{
    return kv_row_bytes(case_kv(v, value), value,
                        value ? v[FACTOR_HEAD_SIZE].b : v[FACTOR_HEAD_SIZE].a);
}

static int64_t scale_bytes(const struct factor_value *v, bool value)
{
    return kv_scale_bytes(case_kv(v, value), value,
                          value ? v[FACTOR_HEAD_SIZE].b : v[FACTOR_HEAD_SIZE].a);
}

static bool scales_inline(const struct factor_value *v)
{
    return v[FACTOR_SCALE_PLACE].a == SCALES_INLINE && kv_has_row_scales(v[FACTOR_KV_DTYPE].a);
}

/* A row with what stands after it. */
static int64_t unit_bytes(const struct factor_value *v, bool value)
{
    return row_bytes(v, value) + (scales_inline(v) ? scale_bytes(v, value) : 0);
}

static int64_t num_rows(const struct factor_value *v, int64_t num_blocks)
{
    return num_blocks * v[FACTOR_BLOCK_SIZE].a * v[FACTOR_HEADS].b;
}

int64_t views_cache_bytes(const struct factor_value *v, int64_t num_blocks)
{
    return num_rows(v, num_blocks) * (unit_bytes(v, false) + unit_bytes(v, true));
}

int64_t views_scales_bytes(const struct factor_value *v, int64_t num_blocks)
{
    int64_t bytes = scale_bytes(v, false) + scale_bytes(v, true);
    return scales_inline(v) ? 0 : num_rows(v, num_blocks) * bytes;
}

static void set_scales(const struct factor_value *v, bool value, int64_t num_blocks, bool hnd,
                       uint8_t *scales, struct attn_kv_view *view)
{
    int64_t size = v[FACTOR_BLOCK_SIZE].a, heads = v[FACTOR_HEADS].b, e = scale_bytes(v, value);
    if (e == 0) {
        return;
    }
    if (scales_inline(v)) {
        view->scale = (uint8_t *)view->data + row_bytes(v, value);
        view->scale_stride_block = view->stride_block;
        view->scale_stride_slot = view->stride_slot;
        view->scale_stride_head = view->stride_head;
        return;
    }
    view->scale = scales + (value ? num_rows(v, num_blocks) * scale_bytes(v, false) : 0);
    view->scale_stride_block = size * heads * e;
    view->scale_stride_slot = hnd ? e : heads * e;
    view->scale_stride_head = hnd ? size * e : e;
}

void views_make(const struct factor_value *v, bool value, int64_t num_blocks, uint8_t *cache,
                uint8_t *scales, struct attn_kv_view *view)
{
    const struct kv_rows rows = {num_blocks,
                                 v[FACTOR_BLOCK_SIZE].a,
                                 v[FACTOR_HEADS].b,
                                 {v[FACTOR_HEAD_SIZE].a, v[FACTOR_HEAD_SIZE].b},
                                 {unit_bytes(v, false), unit_bytes(v, true)}};
    const int32_t layout = v[FACTOR_LAYOUT].a;
    *view = kv_view(layout, value, &rows, cache);
    if (layout == ATTN_KV_LAYOUT_PACKED_K && !value) {
        const int32_t bits = kv_format(case_kv(v, value), value)->bits;
        const int32_t pack = 8 * PACK_BYTES / bits;
        view->pack = view->head_size % pack == 0 ? pack : 8;
        view->stride_slot = view->pack * bits / 8;
        view->stride_pack = rows.block_size * view->stride_slot;
        view->stride_head = rows.block_size * rows.bytes[0];
    }
    set_scales(v, value, num_blocks,
               layout == ATTN_KV_LAYOUT_HND || layout == ATTN_KV_LAYOUT_HND_INNER ||
                   layout == ATTN_KV_LAYOUT_HND_ROWS,
               scales, view);
}

bool views_aligned(const struct factor_value *v, int32_t alignment)
{
    uint8_t *origin = (uint8_t *)(uintptr_t)0x10000; /* an aligned address; never read */
    for (int32_t value = 0; value < 2; value++) {
        struct attn_kv_view view;
        views_make(v, value, 1, origin, origin, &view);
        if (view.stride_block % alignment != 0 || view.stride_slot % alignment != 0 ||
            view.stride_head % alignment != 0 || (int64_t)((uintptr_t)view.data) % alignment != 0) {
            return false;
        }
    }
    return true;
}
