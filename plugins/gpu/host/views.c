/* SPDX-License-Identifier: Apache-2.0 */
/* Turns tensors and cache views of the ABI, which the core has checked, into kernel parameters. */
#include "common/turboquant.h"
#include "gpu/host/instance.h"

struct gpu_tensor gpu_tensor_of(const struct attn_tensor *tensor)
{
    int64_t bytes = tensor->dtype.bits / 8;
    return (struct gpu_tensor){
        (char *)tensor->data + tensor->byte_offset, tensor_stride(tensor, 0) * bytes,
        tensor->ndim > 2 ? tensor_stride(tensor, 1) * bytes : 0, number_dtype_name(tensor->dtype)};
}

struct gpu_lse gpu_lse_of(const struct attn_tensor *tensor)
{
    if (tensor == NULL) {
        return (struct gpu_lse){NULL, 0, 0};
    }
    return (struct gpu_lse){(float *)((char *)tensor->data + tensor->byte_offset),
                            tensor_stride(tensor, 0), tensor_stride(tensor, 1)};
}

int32_t gpu_stored_as(const struct attn_layer_desc *layer, bool is_v, int32_t *form)
{
    *form = GPU_ROW_NUMBERS;
    switch (layer->kv_dtype) {
    case ATTN_KV_FP8_PER_TOKEN_HEAD:
        *form = GPU_ROW_SCALED;
        return ATTN_DTYPE_FP8_E4M3;
    case ATTN_KV_INT8_PER_TOKEN_HEAD:
        *form = GPU_ROW_SCALED;
        return ATTN_DTYPE_INT8;
    case ATTN_KV_INT4_PER_TOKEN_HEAD:
        *form = GPU_ROW_INT4;
        return ATTN_DTYPE_INT8;
    case ATTN_KV_NVFP4:
        *form = GPU_ROW_NVFP4;
        return ATTN_DTYPE_INT8;
    case ATTN_KV_MXFP4:
        *form = GPU_ROW_MXFP4;
        return ATTN_DTYPE_INT8;
    case ATTN_KV_INT8_KV:
        *form = is_v ? GPU_ROW_CHANNEL : GPU_ROW_SCALED;
        return ATTN_DTYPE_INT8;
    case ATTN_KV_INT8_K:
        *form = is_v ? GPU_ROW_NUMBERS : GPU_ROW_SCALED;
        return is_v ? layer->dtype : ATTN_DTYPE_INT8;
    case ATTN_KV_TURBOQUANT_K8V4:
    case ATTN_KV_TURBOQUANT_4BIT_NC:
    case ATTN_KV_TURBOQUANT_K3V4_NC:
    case ATTN_KV_TURBOQUANT_3BIT_NC:
        if (turboquant_bits(layer->kv_dtype, is_v) == 0) {
            return ATTN_DTYPE_FP8_E4M3;
        }
        *form = is_v ? GPU_ROW_STEPS : GPU_ROW_LEVELS;
        return ATTN_DTYPE_INT8;
    default:
        return number_of_kv(layer->kv_dtype);
    }
}

static const struct attn_kv_quant_params *quant_params(const struct attn_layer_params *params)
{
    static const struct attn_kv_quant_params none = {.v_channel_scale = NULL};
    const struct attn_ext *ext = ext_of(params->next, ATTN_EXT_KV_QUANT_PARAMS);
    return ext != NULL ? (const struct attn_kv_quant_params *)ext : &none;
}

static const float *signs_of(const struct attn_layer_params *params, bool is_v)
{
    const struct attn_kv_quant_params *quant = quant_params(params);
    return is_v ? quant->hadamard_signs_v : quant->hadamard_signs_k;
}

static void set_scale(struct gpu_cache *c, const struct attn_layer_desc *layer,
                      const struct attn_layer_params *params, bool is_v)
{
    /* nvfp4 always has one for the tensor */
    int32_t form = c->form == GPU_ROW_NVFP4 ? ATTN_SCALE_PER_TENSOR
                   : is_v                   ? layer->v_scale_form
                                            : layer->k_scale_form;
    float host = is_v ? params->v_scale_host : params->k_scale_host;
    if (form != ATTN_SCALE_NONE) {
        c->scale = is_v ? params->v_scale : params->k_scale;
        c->scale_host = host != 0 ? host : 1;
        c->scale_per_head = form == ATTN_SCALE_PER_HEAD;
    }
}

struct gpu_cache gpu_cache_of(const struct attn_layer_desc *layer,
                              const struct attn_layer_params *params,
                              const struct attn_kv_view *view, bool is_v)
{
    struct gpu_cache c = {
        .data = view->data,
        .block = view->stride_block,
        .slot = view->stride_slot,
        .head = view->stride_head,
        .pack_stride = view->stride_pack,
        .pack = view->pack > 0 && view->pack < view->head_size ? view->pack : 0,
        .head_size = view->head_size,
        .scale_host = 1,
    };
    c.dtype = gpu_stored_as(layer, is_v, &c.form);
    c.bits = turboquant_bits(layer->kv_dtype, is_v);
    if (c.form == GPU_ROW_SCALED || c.form >= GPU_ROW_INT4) {
        c.row_scale = view->scale;
        c.row_scale_block = view->scale_stride_block;
        c.row_scale_slot = view->scale_stride_slot;
        c.row_scale_head = view->scale_stride_head;
    }
    if (c.form == GPU_ROW_CHANNEL) {
        c.channel = quant_params(params)->v_channel_scale;
    } else if (c.form == GPU_ROW_INT4) {
        c.signs = signs_of(params, is_v);
    } else if (layer->kv_dtype != ATTN_KV_INT8_K && layer->kv_dtype != ATTN_KV_TURBOQUANT_K8V4 &&
               c.form != GPU_ROW_SCALED && c.form < GPU_ROW_LEVELS) {
        c.swizzled = c.form == GPU_ROW_NVFP4 && is_v;
        set_scale(&c, layer, params, is_v);
    }
    return c;
}

struct gpu_cache gpu_cache_of_tensor(const struct attn_layer_desc *layer,
                                     const struct attn_layer_params *params,
                                     const struct attn_tensor *tensor, bool is_v)
{
    struct gpu_tensor rows = gpu_tensor_of(tensor);
    struct gpu_cache c = {.data = rows.data,
                          .block = rows.row,
                          .head = rows.head,
                          .dtype = rows.dtype,
                          .head_size = is_v ? layer->head_size_v : layer->head_size,
                          .scale_host = 1};
    if (rows.dtype >= ATTN_DTYPE_FP8_E4M3) {
        set_scale(&c, layer, params, is_v);
    }
    return c;
}

void set_query_scale(struct gpu_params *p, const struct attn_attend_args *args)
{
    const struct attn_layer_params *params = args->params;
    p->q_scale_host = 1;
    if (args->layer->q_scale_form != ATTN_SCALE_NONE) {
        p->q_scale = params->q_scale;
        p->q_scale_host = params->q_scale_host != 0 ? params->q_scale_host : 1;
        p->q_scale_per_head = args->layer->q_scale_form == ATTN_SCALE_PER_HEAD;
    }
}
