/* SPDX-License-Identifier: Apache-2.0 */
#include <attn/draft/mm_encoder.h>

#include "bind/layer_params_copy.h"

#include <stdbool.h>
#include <string.h>

#include "util/structs.h"

/* Replaces *slot by a copy with strides of its own. NULL stays NULL. */
static attn_status keep_tensor(struct layer_params_copy *own, const struct attn_tensor **slot,
                               const char *name, struct attn_error *error)
{
    const struct attn_tensor *source = *slot;
    if (source == NULL) {
        return ATTN_OK;
    }
    if (source->ndim < 1 || source->ndim > TENSOR_MAX_DIMS || source->shape == NULL ||
        source->data == NULL) {
        return error_set(
            error, ATTN_ERROR_INVALID_ARGUMENT, name,
            "%s has %d dimensions, shape %p, data %p; 1 to %d dimensions, and neither may be NULL",
            name, source->ndim, (const void *)source->shape, source->data, TENSOR_MAX_DIMS);
    }
    struct own_tensor *copy = &own->tensors[own->num_tensors++];
    copy->tensor = *source;
    for (int32_t i = 0; i < source->ndim; i++) {
        copy->shape[i] = source->shape[i];
        copy->strides[i] = tensor_stride(source, i);
    }
    copy->tensor.shape = copy->shape;
    copy->tensor.strides = copy->strides;
    *slot = &copy->tensor;
    return ATTN_OK;
}

/* Puts our copy of an extension at the front of our chain; its reader's size, a missing tail zero.
 */
static bool keep_extension(struct layer_params_copy *own, const struct attn_ext *chain, uint32_t id,
                           struct attn_ext *copy, size_t size)
{
    const struct attn_ext *found = ext_find(chain, id);
    if (found == NULL) {
        return false;
    }
    memcpy(copy, found, found->struct_size < size ? found->struct_size : size);
    copy->struct_size = size;
    copy->next = own->params.next;
    own->params.next = copy;
    return true;
}

attn_status layer_params_copy_take(struct layer_params_copy *own,
                                   const struct attn_layer_params *given, struct attn_error *error)
{
    memset(own, 0, sizeof *own);
    own->params = *given;
    own->params.next = NULL;
    attn_status status = keep_tensor(own, &own->params.sink_k, "sink_k", error);
    status = status ? status : keep_tensor(own, &own->params.sink_v, "sink_v", error);
    keep_extension(own, given->next, ATTN_EXT_KV_QUANT_PARAMS, &own->kv_quant.ext,
                   sizeof own->kv_quant);
    keep_extension(own, given->next, ATTN_EXT_DRAFT_MM_ENCODER_STATE, &own->encoder.ext,
                   sizeof own->encoder);
    keep_extension(own, given->next, ATTN_EXT_DRAFT_RECURRENT_SKIP, &own->skip.ext,
                   sizeof own->skip);
    if (keep_extension(own, given->next, ATTN_EXT_MLA_WEIGHTS, &own->mla.ext, sizeof own->mla)) {
        struct attn_mla_weights *w = &own->mla;
        status = status ? status : keep_tensor(own, &w->kv_b_proj, "kv_b_proj", error);
        status = status ? status : keep_tensor(own, &w->w_uk, "w_uk", error);
        status = status ? status : keep_tensor(own, &w->w_uv, "w_uv", error);
        status = status ? status : keep_tensor(own, &w->w_uk_scale, "w_uk_scale", error);
        status = status ? status : keep_tensor(own, &w->w_uv_scale, "w_uv_scale", error);
    }
    if (keep_extension(own, given->next, ATTN_EXT_RECURRENT_WEIGHTS, &own->gdn.ext,
                       sizeof own->gdn)) {
        status = status ? status : keep_tensor(own, &own->gdn.conv_weight, "conv_weight", error);
        status = status ? status : keep_tensor(own, &own->gdn.conv_bias, "conv_bias", error);
    }
    return status;
}
