/* SPDX-License-Identifier: Apache-2.0 */
/* What the declared masks cannot say. */
#include "common/entry.h"
#include "common/turboquant.h"
#include "internal.h"

/* Latent rows are plain numbers or fp8_ds_mla's, and only they are. */
static void supports_latent(const struct attn_layer_desc *layer,
                            const struct attn_reason_sink *reasons)
{
    const uint64_t plain = BIT(ATTN_KV_F16) | BIT(ATTN_KV_BF16) | BIT(ATTN_KV_F32) |
                           BIT(ATTN_KV_FP8_E4M3) | BIT(ATTN_KV_FP8_E5M2);
    char asked[32];
    if (layer->kv_dtype != ATTN_KV_FP8_DS_MLA && !(plain >> layer->kv_dtype & 1)) {
        snprintf(asked, sizeof asked, "%d", layer->kv_dtype);
        reasons->refuse(reasons->user, "kv_dtype", asked,
                        "f16, bf16, f32, fp8_e4m3, fp8_e5m2, fp8_ds_mla in MLA layers");
    }
    snprintf(asked, sizeof asked, "%d", layer->head_size);
    if (layer->kv_dtype == ATTN_KV_FP8_DS_MLA && layer->head_size != 576) {
        reasons->refuse(reasons->user, "head_size", asked, "512 + 64 with kv_dtype fp8_ds_mla");
    }
    const struct attn_mla_desc *mla = mla_of(layer);
    if (mla != NULL && mla->kv_lora_rank % 8 != 0) {
        snprintf(asked, sizeof asked, "%d", mla->kv_lora_rank);
        reasons->refuse(reasons->user, "kv_lora_rank", asked, "multiples of 8");
    }
    /* entries of a list have no places in a row for them */
    if (mla != NULL && mla->topk > 0 && layer->alibi != ATTN_ALIBI_NONE) {
        reasons->refuse(reasons->user, "alibi", "set", "none in sparse MLA layers");
    }
    if (mla != NULL && mla->topk > 0 && layer->tree_mask != ATTN_TREE_NONE) {
        reasons->refuse(reasons->user, "tree_mask", "set", "none in sparse MLA layers");
    }
}

/* Rows of codes split at certain sizes only. */
static void supports_coded(const struct attn_layer_desc *layer, int32_t width,
                           const struct attn_reason_sink *reasons)
{
    char asked[32];
    snprintf(asked, sizeof asked, "%d, %d", layer->head_size, width);
    if (layer->kv_dtype == ATTN_KV_NVFP4 && (layer->head_size % 16 != 0 || width % 64 != 0)) {
        reasons->refuse(reasons->user, "head_size", asked,
                        "multiples of 16, of 64 for v, with kv_dtype nvfp4");
    }
    if (turboquant_bits(layer->kv_dtype, false) > 0 &&
        (layer->head_size & (layer->head_size - 1)) != 0) {
        reasons->refuse(reasons->user, "head_size", asked,
                        "powers of two for turned keys of TurboQuant");
    }
    if (layer->kv_dtype == ATTN_KV_NVFP4 && layer->block_size % 4 != 0) {
        snprintf(asked, sizeof asked, "%d", layer->block_size);
        reasons->refuse(reasons->user, "block_size", asked, "multiples of 4 with kv_dtype nvfp4");
    }
}

attn_status simd_supports(const struct attn_supports_args *args,
                          const struct attn_reason_sink *reasons, struct attn_error *error)
{
    const struct attn_layer_desc *layer = args->layer;
    (void)error;
    if (layer_is_latent(layer)) {
        supports_latent(layer, reasons);
    } else if (layer->kv_dtype == ATTN_KV_FP8_DS_MLA) {
        reasons->refuse(reasons->user, "kv_dtype", "fp8_ds_mla", "in MLA layers only");
    }
    int32_t width = layer->head_size_v > 0 ? layer->head_size_v : layer->head_size;
    if (layer->kv_dtype == ATTN_KV_INT4_PER_TOKEN_HEAD &&
        ((layer->head_size & (layer->head_size - 1)) != 0 || (width & (width - 1)) != 0)) {
        char asked[32];
        snprintf(asked, sizeof asked, "%d, %d", layer->head_size, width);
        reasons->refuse(reasons->user, "head_size", asked,
                        "powers of two with kv_dtype int4_per_token_head");
    }
    if ((layer->kv_dtype == ATTN_KV_Q8_0 || layer->kv_dtype == ATTN_KV_Q4_0) &&
        (layer->head_size % BLOCK_ELEMENTS != 0 || width % BLOCK_ELEMENTS != 0)) {
        char asked[32];
        snprintf(asked, sizeof asked, "%d, %d", layer->head_size, width);
        reasons->refuse(reasons->user, "head_size", asked,
                        "multiples of 32 with kv_dtype q8_0 and q4_0");
    }
    supports_coded(layer, width, reasons);
    if (layer->kv_dtype == ATTN_KV_INT8_K && layer->dtype == ATTN_DTYPE_F32) {
        reasons->refuse(reasons->user, "dtype", "f32", "f16, bf16 with kv_dtype int8_k");
    }
    return ATTN_OK;
}
