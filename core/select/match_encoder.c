/* SPDX-License-Identifier: Apache-2.0 */
/* The fp8 path of a multimodal encoder: the core keeps the scales and quantizes q, k and v, which
 * the backend's attend then takes as they are. */
#include "select/match_check.h"
#include "select/names.h"

static void need(struct check *check, bool there, const char *asked)
{
    if (!there) {
        reasons_add(check->reasons, "mm_encoder_fp8", asked, "no");
    }
}

bool check_is_quantized_encoder(const struct check *check)
{
    return check->whole->mm_quant != NULL && check->whole->mm_quant->fp8;
}

void check_encoder(struct check *check)
{
    const struct attn_backend_caps *caps = check->caps;
    if (!check_is_quantized_encoder(check)) {
        return;
    }
    need(check, caps->features & ATTN_FEATURE_FP8_INPUTS, "keys and values in e4m3, contiguous");
    need(check, caps->features & ATTN_FEATURE_QUANTIZED_QUERY, "a quantized query");
    need(check, caps->q_dtypes >> ATTN_DTYPE_FP8_E4M3 & 1, "a query in e4m3");
    need(check, caps->kv_dtypes >> ATTN_KV_FP8_E4M3 & 1, "kv_dtype fp8_e4m3");
    need(check, (caps->k_scale_forms & caps->v_scale_forms) >> ATTN_SCALE_PER_TENSOR & 1,
         "scales per tensor");
    check_need_kernel(check, ATTN_KERNEL_QUANTIZE, "quantize");
    if (check->whole->mm_quant->amax_history_len > 0) {
        check_need_kernel(check, ATTN_KERNEL_AMAX, "amax");
    }
    if (caps->device.type != ATTN_DEVICE_CPU) { /* it divides the history's largest by 448 itself */
        reasons_add(check->reasons, "mm_encoder_fp8", "scales kept by the core", "on a CPU");
    }
    check_compose(check, ATTN_COMPOSE_MM_ENCODER, ATTN_GRAPH_ALWAYS);
}
