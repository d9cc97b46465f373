/* SPDX-License-Identifier: Apache-2.0 */
/* What caches are made of: the rows of each kv_dtype, and where they lie in each layout. */
#ifndef SUPPORT_KV_FORMAT_H
#define SUPPORT_KV_FORMAT_H

#include <attn/kv_cache.h>
#include <stdbool.h>
#include <stdint.h>

enum kv_form {
    KV_FORM_UNKNOWN,
    KV_FORM_NUMBERS,  /* with a scale per tensor or head */
    KV_FORM_SCALED,   /* e4m3 or int8 with a float32 scale of their own */
    KV_FORM_CHANNELS, /* int8 with static scales */
    KV_FORM_HADAMARD, /* int4 of rotated rows, zero point in the scale's low mantissa bits */
    KV_FORM_NVFP4,
    KV_FORM_MXFP4,
    KV_FORM_DS_MLA,
    KV_FORM_DS_V4,
    KV_FORM_LEVELS, /* TurboQuant's keys: levels of rotated unit rows, norm in float16 */
    KV_FORM_STEPS,  /* TurboQuant's values: step and zero in float16 */
    KV_FORM_BLOCKS  /* ggml's: a float16 step before the codes of KV_BLOCK elements */
};

#define KV_BLOCK 32

struct kv_format {
    enum kv_form form;
    int32_t number;      /* enum attn_dtype_id of whole elements; 0: the layer's, or codes */
    int32_t bits;        /* bits per element */
    int32_t scale_bytes; /* scale bytes per row; NVFP4's follow the head size */
};

/* The format of keys or values of a kv_dtype of the project's own (enum attn_kv_dtype) other than
 * auto. */
const struct kv_format *kv_format(int32_t kv_dtype, bool value);
/* Bytes of a row, steps of blocks included, and of its scales, 0 without. */
int64_t kv_row_bytes(int32_t kv_dtype, bool value, int32_t head_size);
int32_t kv_scale_bytes(int32_t kv_dtype, bool value, int32_t head_size);

/* Rows of K and V in one memory. */
struct kv_rows {
    int64_t num_blocks;
    int32_t block_size, num_heads;
    int32_t head_size[2];
    int64_t bytes[2]; /* from one row of a head to what lies next to it */
};
/* The view of K or V in a layout (enum attn_kv_layout; packed keys lie as NHD), without scales. */
struct attn_kv_view kv_view(int32_t layout, bool value, const struct kv_rows *rows, void *base);

#endif
