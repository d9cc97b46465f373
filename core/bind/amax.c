/* SPDX-License-Identifier: Apache-2.0 */
/* Largest magnitudes of tensors, from which an engine calculates scales. */
#include "bind/bound.h"
#include "bind/model.h"
#include "bind/address_check.h"
#include "util/structs.h"
#include "util/tensor.h"

attn_status layer_amax(attn_layer *layer, const struct attn_amax_args *args,
                       struct attn_error *error)
{
    struct attn_amax_args read;
    struct attn_error why = ATTN_ERROR_INIT;
    TRY(struct_read(&read, ABI_AMAX_ARGS, args, error));
    if (layer == NULL || read.out == NULL || read.instance != NULL) {
        return BAD("out",
                   "layer %p, out %p, instance %p; the first two are needed, and instance is "
                   "NULL",
                   (const void *)layer, (const void *)read.out, (const void *)read.instance);
    }

    if (!tensor_is_numbers(read.x, 3)) {
        return BAD("x",
                   "layer '%s': x is NULL or not [rows, heads, size] of numbers with a "
                   "contiguous last dimension",
                   layer->desc->name);
    }
    if (read.history_len != 0) {
        return BAD("history_len",
                   "layer '%s': history_len is %d; 0, since the steps of a quantized "
                   "encoder keep its history",
                   layer->desc->name, read.history_len);
    }
    const struct instance *instance = layer->served[ATTN_PHASE_PREFILL].instance;
    if (instance->kernels.amax == NULL) {
        return error_set(error, ATTN_ERROR_UNSUPPORTED, "amax", "%s has no amax",
                         instance->caps->name);
    }
    TRY(address_check_tensor(layer->model, read.x, "x", false, error));
    read.instance = instance->handle;
    const attn_status status = instance->kernels.amax(&read, &why);
    return status == ATTN_OK ? ATTN_OK : error_relay(error, status, &why);
}
