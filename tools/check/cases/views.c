/* SPDX-License-Identifier: Apache-2.0 */
#include "support/client.h"
#include "cases/views.h"

#define PACK_BYTES 16 /* size of the inner pack: [N, Hk, D/x, B, x] */

int32_t views_bits(int32_t kv_dtype, bool value)
{
    static const int8_t bits[][2] = {[ATTN_KV_F16] = {16, 16},
                                     [ATTN_KV_BF16] = {16, 16},
                                     [ATTN_KV_F32] = {32, 32},
                                     [ATTN_KV_FP8_E4M3] = {8, 8},
                                     [ATTN_KV_FP8_E5M2] = {8, 8},
                                     [ATTN_KV_FP8_E4M3FNUZ] = {8, 8},
                                     [ATTN_KV_FP8_PER_TOKEN_HEAD] = {8, 8},
                                     [ATTN_KV_INT8_PER_TOKEN_HEAD] = {8, 8},
                                     [ATTN_KV_INT4_PER_TOKEN_HEAD] = {4, 4},
                                     [ATTN_KV_INT8_KV] = {8, 8},
                                     [ATTN_KV_INT8_K] = {8, 16},
                                     [ATTN_KV_NVFP4] = {4, 4},
                                     [ATTN_KV_TURBOQUANT_K8V4] = {8, 4},
                                     [ATTN_KV_TURBOQUANT_4BIT_NC] = {4, 4},
                                     [ATTN_KV_TURBOQUANT_K3V4_NC] = {3, 4},
                                     [ATTN_KV_TURBOQUANT_3BIT_NC] = {3, 3},
                                     [ATTN_KV_Q8_0] = {8, 8},
                                     [ATTN_KV_Q4_0] = {4, 4}};
    return bits[kv_dtype][value];
}

int32_t views_scale_bytes(int32_t kv_dtype, bool value, int32_t head_size)
{
    switch (kv_dtype) {
    case ATTN_KV_FP8_PER_TOKEN_HEAD:
    case ATTN_KV_INT8_PER_TOKEN_HEAD:
    case ATTN_KV_INT4_PER_TOKEN_HEAD:
        return 4;
    case ATTN_KV_INT8_KV:
    case ATTN_KV_INT8_K:
        return value ? 0 : 4;
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

int64_t views_row_bytes(int32_t kv_dtype, bool value, int32_t head_size)
{
    int64_t steps = kv_is_blocks(kv_dtype) ? head_size / KV_BLOCK * 2 : 0;
    return (int64_t)head_size * views_bits(kv_dtype, value) / 8 + steps;
}

static int64_t row_bytes(const struct factor_value *v, bool value)
{
    return views_row_bytes(case_kv(v, value), value,
                           value ? v[FACTOR_HEAD_SIZE].b : v[FACTOR_HEAD_SIZE].a);
}

static int64_t scale_bytes(const struct factor_value *v, bool value)
{
    return views_scale_bytes(case_kv(v, value), value,
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
    int64_t size = v[FACTOR_BLOCK_SIZE].a, heads = v[FACTOR_HEADS].b;
    int64_t k_unit = unit_bytes(v, false), mine = unit_bytes(v, value);
    int64_t page = size * heads * (k_unit + unit_bytes(v, true));
    int32_t layout = v[FACTOR_LAYOUT].a, bits = views_bits(case_kv(v, value), value);
    bool hnd = layout == ATTN_KV_LAYOUT_HND || layout == ATTN_KV_LAYOUT_HND_INNER;
    int64_t before = value ? num_rows(v, num_blocks) * k_unit : 0; /* V stands after K */
    *view = SIZED(attn_kv_view, .num_blocks = num_blocks, .block_size = (int32_t)size,
                  .num_heads = (int32_t)heads,
                  .head_size = value ? v[FACTOR_HEAD_SIZE].b : v[FACTOR_HEAD_SIZE].a,
                  .stride_block = size * heads * mine, .stride_slot = hnd ? mine : heads * mine,
                  .stride_head = hnd ? size * mine : mine);
    if (layout == ATTN_KV_LAYOUT_NHD_INNER || layout == ATTN_KV_LAYOUT_HND_INNER) {
        view->stride_block = page;
        before = value ? size * heads * k_unit : 0;
    } else if (layout == ATTN_KV_LAYOUT_HND_ROWS) {
        view->stride_slot = page / (size * heads);
        view->stride_head = page / heads;
        view->stride_block = page;
        before = value ? k_unit : 0;
    } else if (layout == ATTN_KV_LAYOUT_PACKED_K && !value) {
        int32_t pack = 8 * PACK_BYTES / bits;
        view->pack = view->head_size % pack == 0 ? pack : 8;
        view->stride_slot = view->pack * bits / 8;
        view->stride_pack = size * view->stride_slot;
        view->stride_head = size * mine;
    }
    view->data = cache + before;
    set_scales(v, value, num_blocks, hnd || layout == ATTN_KV_LAYOUT_HND_ROWS, scales, view);
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
