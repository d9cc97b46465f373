/* SPDX-License-Identifier: Apache-2.0 */
/* What plugins read out of their arguments: extensions, addresses of rows, scales; and the text of
 * an error. */
#ifndef PLUGINS_COMMON_TENSORS_H
#define PLUGINS_COMMON_TENSORS_H

#include <attn/cache_kernels.h>
#include <attn/draft/index_lists.h>
#include <attn/mla.h>
#include <attn/status.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

static inline int64_t tensor_stride(const struct attn_tensor *tensor, int32_t dim)
{
    int64_t stride = 1;
    if (tensor->strides != NULL) {
        return tensor->strides[dim];
    }
    for (int32_t i = tensor->ndim - 1; i > dim; i--) {
        stride *= tensor->shape[i];
    }
    return stride;
}

/* The extension of that id in a chain, or NULL. */
static inline const void *ext_of(const struct attn_ext *next, uint32_t id)
{
    while (next != NULL && next->id != id) {
        next = next->next;
    }
    return next;
}

static inline const struct attn_mla_desc *mla_of(const struct attn_layer_desc *layer)
{
    return ext_of(layer->next, ATTN_EXT_MLA_DESC);
}

static inline const struct attn_index_lists *lists_of(const struct attn_layer_desc *layer)
{
    return ext_of(layer->next, ATTN_EXT_DRAFT_INDEX_LISTS);
}

static inline bool layer_is_latent(const struct attn_layer_desc *layer)
{
    return layer->kind == ATTN_LAYER_MLA;
}

/* What an attend that writes does first: the step's own rows go to their slots before any of them
 * is attended. */
static inline struct attn_write_kv_args write_of_attend(const struct attn_attend_args *args)
{
    return (struct attn_write_kv_args){.struct_size = sizeof(struct attn_write_kv_args),
                                       .instance = args->instance,
                                       .layer = args->layer,
                                       .params = args->params,
                                       .k_cache = args->k_cache,
                                       .v_cache = args->v_cache,
                                       .slot_mapping = args->batch->slot_mapping,
                                       .num_slots = args->batch->num_slots,
                                       .stream = args->stream,
                                       .k = args->k,
                                       .v = args->v};
}

/* Element (i, j, 0) of a tensor of whole-byte elements. */
static inline void *tensor_row(const struct attn_tensor *tensor, int64_t i, int64_t j)
{
    int64_t elements = i * tensor_stride(tensor, 0) + j * tensor_stride(tensor, 1);
    return (uint8_t *)tensor->data + tensor->byte_offset + elements * (tensor->dtype.bits / 8);
}

static inline void *view_row(const struct attn_kv_view *view, int64_t block, int64_t slot,
                             int64_t head)
{
    return (uint8_t *)view->data + block * view->stride_block + slot * view->stride_slot +
           head * view->stride_head;
}

static inline float *view_scale(const struct attn_kv_view *view, int64_t block, int64_t slot,
                                int64_t head)
{
    return (float *)((uint8_t *)view->scale + block * view->scale_stride_block +
                     slot * view->scale_stride_slot + head * view->scale_stride_head);
}

/* A per-tensor or per-head scale: the device's, else the host's, where 0 reads as 1. */
static inline double scale_of_head(const float *device, float host, int32_t form, int64_t head)
{
    if (form == ATTN_SCALE_NONE) {
        return 1;
    }
    if (device == NULL) {
        return host == 0 ? 1 : host;
    }
    return device[form == ATTN_SCALE_PER_HEAD ? head : 0];
}

#if defined(__GNUC__)
__attribute__((format(printf, 4, 5)))
#endif
static inline attn_status
plugin_error(struct attn_error *error, attn_status status, const char *field, const char *format,
             ...)
{
    if (error != NULL && error->struct_size >= sizeof *error) {
        va_list arguments;
        va_start(arguments, format);
        error->status = status;
        snprintf(error->field, sizeof error->field, "%s", field);
        vsnprintf(error->message, sizeof error->message, format, arguments);
        va_end(arguments);
    }
    return status;
}

#endif
