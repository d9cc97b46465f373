/* SPDX-License-Identifier: Apache-2.0 */
#include "kv_format.h"

#include "client.h"

#define BOTH(...)                                                                                  \
    {                                                                                              \
        {__VA_ARGS__}, {__VA_ARGS__},                                                              \
    }
/* formats of keys, then of values */
static const struct kv_format formats[ATTN_KV_MXFP4 + 1][2] = {
    [ATTN_KV_F16] = BOTH(KV_FORM_NUMBERS, ATTN_DTYPE_F16, 16, 0),
    [ATTN_KV_BF16] = BOTH(KV_FORM_NUMBERS, ATTN_DTYPE_BF16, 16, 0),
    [ATTN_KV_F32] = BOTH(KV_FORM_NUMBERS, ATTN_DTYPE_F32, 32, 0),
    [ATTN_KV_FP8_E4M3] = BOTH(KV_FORM_NUMBERS, ATTN_DTYPE_FP8_E4M3, 8, 0),
    [ATTN_KV_FP8_E5M2] = BOTH(KV_FORM_NUMBERS, ATTN_DTYPE_FP8_E5M2, 8, 0),
    [ATTN_KV_FP8_E4M3FNUZ] = BOTH(KV_FORM_NUMBERS, ATTN_DTYPE_FP8_E4M3FNUZ, 8, 0),
    [ATTN_KV_FP8_PER_TOKEN_HEAD] = BOTH(KV_FORM_SCALED, ATTN_DTYPE_FP8_E4M3, 8, 4),
    [ATTN_KV_INT8_PER_TOKEN_HEAD] = BOTH(KV_FORM_SCALED, ATTN_DTYPE_INT8, 8, 4),
    [ATTN_KV_INT4_PER_TOKEN_HEAD] = BOTH(KV_FORM_HADAMARD, 0, 4, 4),
    [ATTN_KV_INT8_KV] = {{KV_FORM_SCALED, ATTN_DTYPE_INT8, 8, 4},
                         {KV_FORM_CHANNELS, ATTN_DTYPE_INT8, 8, 0}},
    [ATTN_KV_INT8_K] = {{KV_FORM_SCALED, ATTN_DTYPE_INT8, 8, 4}, {KV_FORM_NUMBERS, 0, 16, 0}},
    [ATTN_KV_NVFP4] = BOTH(KV_FORM_NVFP4, 0, 4, 0),
    [ATTN_KV_FP8_DS_MLA] = {{KV_FORM_DS_MLA, 0, 8, 0}, {KV_FORM_UNKNOWN, 0, 0, 0}},
    [ATTN_KV_FP8_DS_V4] = {{KV_FORM_DS_V4, 0, 8, 8}, {KV_FORM_UNKNOWN, 0, 0, 0}},
    [ATTN_KV_MXFP4] = {{KV_FORM_MXFP4, 0, 4, 0}, {KV_FORM_UNKNOWN, 0, 0, 0}},
    [ATTN_KV_TURBOQUANT_K8V4] = {{KV_FORM_NUMBERS, ATTN_DTYPE_FP8_E4M3, 8, 0},
                                 {KV_FORM_STEPS, 0, 4, 4}},
    [ATTN_KV_TURBOQUANT_4BIT_NC] = {{KV_FORM_LEVELS, 0, 4, 2}, {KV_FORM_STEPS, 0, 4, 4}},
    [ATTN_KV_TURBOQUANT_K3V4_NC] = {{KV_FORM_LEVELS, 0, 3, 2}, {KV_FORM_STEPS, 0, 4, 4}},
    [ATTN_KV_TURBOQUANT_3BIT_NC] = {{KV_FORM_LEVELS, 0, 3, 2}, {KV_FORM_STEPS, 0, 3, 4}},
    [ATTN_KV_Q8_0] = BOTH(KV_FORM_BLOCKS, 0, 8, 0),
    [ATTN_KV_Q4_0] = BOTH(KV_FORM_BLOCKS, 0, 4, 0),
};

const struct kv_format *kv_format(int32_t kv_dtype, bool value)
{
    return &formats[kv_dtype][value];
}

int64_t kv_row_bytes(int32_t kv_dtype, bool value, int32_t head_size)
{
    const struct kv_format *f = kv_format(kv_dtype, value);
    if (f->form == KV_FORM_DS_MLA || f->form == KV_FORM_DS_V4) {
        return f->form == KV_FORM_DS_MLA ? 656 : 576;
    }
    const int64_t steps = f->form == KV_FORM_BLOCKS ? head_size / KV_BLOCK * 2 : 0;
    return (int64_t)head_size * f->bits / 8 + steps;
}

int32_t kv_scale_bytes(int32_t kv_dtype, bool value, int32_t head_size)
{
    const struct kv_format *f = kv_format(kv_dtype, value);
    return f->form == KV_FORM_NVFP4   ? head_size / 16
           : f->form == KV_FORM_MXFP4 ? head_size / 32
                                      : f->scale_bytes;
}

struct attn_kv_view kv_view(int32_t layout, bool value, const struct kv_rows *rows, void *base)
{
    const bool hnd = layout == ATTN_KV_LAYOUT_HND || layout == ATTN_KV_LAYOUT_HND_INNER;
    const bool inner = layout == ATTN_KV_LAYOUT_NHD_INNER || layout == ATTN_KV_LAYOUT_HND_INNER;
    const int64_t size = rows->block_size, heads = rows->num_heads, mine = rows->bytes[value];
    const int64_t both = rows->bytes[0] + rows->bytes[1], block_rows = size * heads;
    int64_t before = (inner ? 1 : rows->num_blocks) * block_rows * rows->bytes[0];
    struct attn_kv_view view =
        SIZED(attn_kv_view, .num_blocks = rows->num_blocks, .block_size = rows->block_size,
              .num_heads = rows->num_heads, .head_size = rows->head_size[value],
              .stride_block = block_rows * (inner ? both : mine),
              .stride_slot = hnd ? mine : heads * mine, .stride_head = hnd ? size * mine : mine);
    if (layout == ATTN_KV_LAYOUT_HND_ROWS) { /* V's row after K's */
        view.stride_slot = both;
        view.stride_head = size * both;
        view.stride_block = block_rows * both;
        before = rows->bytes[0];
    }
    view.data = (uint8_t *)base + (value ? before : 0);
    return view;
}
