/* SPDX-License-Identifier: Apache-2.0 */
/* Conditions that the declared masks cannot express. */
#include "common/declared.h"
#include "cpu_simd/internal.h"

/* Conditions on latent rows beyond those of all backends. */
static void supports_latent(const struct attn_layer_desc *layer,
                            const struct attn_reason_sink *reasons)
{
    char asked[32];
    const struct attn_mla_desc *mla = mla_of(layer);
    if (mla != NULL && mla->kv_lora_rank % 8 != 0) {
        snprintf(asked, sizeof asked, "%d", mla->kv_lora_rank);
        reasons->refuse(reasons->user, "kv_lora_rank", asked, "multiples of 8");
    }
    /* entries of a list have no places in a row for them */
    if (mla != NULL && mla->topk > 0 && layer->alibi != ATTN_ALIBI_NONE) {
        reasons->refuse(reasons->user, "alibi", "set", "none in sparse MLA layers");
    }
    if (layer->sink_len > 0) {
        snprintf(asked, sizeof asked, "%d", layer->sink_len);
        reasons->refuse(reasons->user, "sink_len", asked, "0 in MLA layers");
    }
    if (mla != NULL && mla->topk > 0 && layer->tree_mask != ATTN_TREE_NONE) {
        reasons->refuse(reasons->user, "tree_mask", "set", "none in sparse MLA layers");
    }
}

attn_status simd_supports(const struct attn_supports_args *args,
                          const struct attn_reason_sink *reasons, struct attn_error *error)
{
    const struct attn_layer_desc *layer = args->layer;
    refuse_rows(args, reasons);
    if (layer_is_latent(layer)) {
        supports_latent(layer, reasons);
    }
    refuse_beside_lists(layer, reasons);
    /* fp8 probabilities are relative to a row's largest score, which has to be known first, and
     * sinks come last */
    if (layer->sink_len > 0 && layer->p_scale_form != ATTN_SCALE_NONE) {
        reasons->refuse(reasons->user, "p_scale_form", "set", "none with static sinks");
    }
    return ATTN_OK;
}
