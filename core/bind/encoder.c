/* SPDX-License-Identifier: Apache-2.0 */
/* Multimodal encoders in fp8: the memory of their scales, and the layer as its kernels see it. */
#include "bind/bound.h"
#include "util/error.h"
#include "util/structs.h"

#define BAD(field, ...) error_set(error, ATTN_ERROR_INVALID_ARGUMENT, field, __VA_ARGS__)

bool layer_is_quantized_encoder(const attn_layer *layer)
{
    return layer->selected->mm_quant != NULL && layer->selected->mm_quant->fp8;
}

const struct attn_mm_encoder_state *encoder_state(const struct attn_layer_params *params)
{
    return (const struct attn_mm_encoder_state *)ext_find(params->next, ATTN_EXT_MM_ENCODER_STATE,
                                                          sizeof(struct attn_mm_encoder_state));
}

attn_status encoder_check_state(const attn_layer *layer, const struct attn_layer_params *params,
                                struct attn_error *error)
{
    const struct attn_mm_encoder_state *state = encoder_state(params);
    const char *name = layer->desc->name;
    int32_t length = layer->selected->mm_quant->amax_history_len;
    if (state == NULL || state->scales == NULL) {
        return BAD("attn_mm_encoder_state",
                   "layer '%s' quantizes its inputs; attn_mm_encoder_state and its scales [3] are "
                   "needed on the parameters",
                   name);
    }
    if ((state->amax_history != NULL) != (length > 0)) {
        return BAD("amax_history",
                   "layer '%s': amax_history is %p and amax_history_len %d; [3, amax_history_len], "
                   "or NULL with scales that are given",
                   name, (const void *)state->amax_history, length);
    }
    return ATTN_OK;
}

/* One attend over inputs that the core has quantized. */
void encoder_rewrite_parts(attn_layer *layer)
{
    struct attn_layer_desc *desc = &layer->parts[PART_MAIN];
    struct attn_layer_params *params = &layer->part_params[PART_MAIN];
    const struct attn_mm_encoder_state *state = encoder_state(params);
    int32_t padded = layer->selected->mm_quant->padded_head_size;
    desc->head_size = padded > 0 ? padded : desc->head_size;
    desc->kv_dtype = ATTN_KV_FP8_E4M3;
    desc->q_dtype = ATTN_DTYPE_FP8_E4M3;
    desc->q_scale_form = desc->k_scale_form = desc->v_scale_form = ATTN_SCALE_PER_TENSOR;
    if (state != NULL) {
        params->q_scale = &state->scales[0];
        params->k_scale = &state->scales[1];
        params->v_scale = &state->scales[2];
    }
}
