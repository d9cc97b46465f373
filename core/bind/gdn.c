/* SPDX-License-Identifier: Apache-2.0 */
/* Weights of GDN layers: borrowed, and handed to kernels as they came. */
#include "bind/bound.h"
#include "util/structs.h"

#define BAD(field, ...) error_set(error, ATTN_ERROR_INVALID_ARGUMENT, field, __VA_ARGS__)

attn_status gdn_check_weights(const attn_layer *layer, const struct attn_layer_params *params,
                              struct attn_error *error)
{
    const struct attn_gdn_desc *g = layer->selected->gdn;
    const struct attn_ext *ext =
        ext_find(params->next, ATTN_EXT_GDN_WEIGHTS, sizeof(struct attn_gdn_weights));
    const struct attn_gdn_weights *weights = (const struct attn_gdn_weights *)ext;
    const char *name = layer->desc->name;
    int64_t channels =
        2 * (int64_t)g->num_k_heads * g->head_size_k + (int64_t)g->num_v_heads * g->head_size_v;
    if (weights == NULL || weights->a_log == NULL || weights->dt_bias == NULL) {
        return BAD("attn_gdn_weights",
                   "layer '%s': the parameters bring no attn_gdn_weights, or a_log %p or "
                   "dt_bias %p is NULL",
                   name, weights != NULL ? (const void *)weights->a_log : NULL,
                   weights != NULL ? (const void *)weights->dt_bias : NULL);
    }
    const struct attn_tensor *conv = weights->conv_weight, *bias = weights->conv_bias;
    if (g->conv_width > 0 && (conv == NULL || conv->ndim != 2 || conv->shape == NULL ||
                              conv->shape[0] != channels || conv->shape[1] != g->conv_width)) {
        return BAD("conv_weight", "layer '%s': conv_weight is NULL or not [%lld, %d]", name,
                   (long long)channels, g->conv_width);
    }
    if (g->conv_width > 0 && bias != NULL &&
        (bias->ndim != 1 || bias->shape == NULL || bias->shape[0] != channels)) {
        return BAD("conv_bias", "layer '%s': conv_bias is not [%lld]", name, (long long)channels);
    }
    return ATTN_OK;
}
