/* SPDX-License-Identifier: Apache-2.0 */
/* A layer's parameters, checked and copied, and largest magnitudes of tensors, from which an engine
 * calculates scales. */
#include <string.h>

#include "bind/address_check.h"
#include "bind/bound.h"

/* Replaces the tensor of a field by a copy with strides of its own. NULL stays NULL. */
static attn_status keep_tensor(struct layer_params_copy *own, void *ours,
                               const struct abi_field *field, struct attn_error *error)
{
    const struct attn_tensor *source = field_pointer(ours, field);
    if (source == NULL) {
        return ATTN_OK;
    }
    BAD_IF(source->ndim < 1 || source->ndim > TENSOR_MAX_DIMS || source->shape == NULL ||
               source->data == NULL,
           field->name,
           "%s has %d dimensions, shape %p, data %p; 1 to %d dimensions, and neither may be NULL",
           field->name, source->ndim, (const void *)source->shape, source->data, TENSOR_MAX_DIMS);
    struct own_tensor *copy = &own->tensors[own->num_tensors++];
    const struct attn_tensor *pointer = &copy->tensor;
    tensor_copy(copy, source);
    memcpy((char *)ours + field->at, &pointer, sizeof pointer);
    return ATTN_OK;
}

static attn_status keep_tensors(struct layer_params_copy *own, void *ours,
                                const struct abi_field *field, struct attn_error *error)
{
    for (; field->name != NULL; field++) {
        TRY_IF(field->kind == FIELD_TENSOR, keep_tensor(own, ours, field, error));
    }
    return ATTN_OK;
}

attn_status layer_params_copy_take(struct layer_params_copy *own,
                                   const struct attn_layer_params *given, struct attn_error *error)
{
    size_t used = 0;
    memset(own, 0, sizeof *own);
    own->params = *given;
    own->params.next = NULL;
    TRY(keep_tensors(own, &own->params, abi_structs[ABI_LAYER_PARAMS].fields, error));
    for (const struct attn_ext *ext = given->next; ext != NULL; ext = ext->next) {
        const struct abi_struct *row = abi_find(ext->id, ABI_LAYER_PARAMS);
        if (row != NULL) { /* each once: there is room for all of the table */
            struct attn_ext *copy = (struct attn_ext *)(void *)(own->extensions.bytes + used);
            ext_copy(copy, ext, row->size);
            copy->next = own->params.next;
            own->params.next = copy;
            used +=
                (row->size + sizeof(max_align_t) - 1) / sizeof(max_align_t) * sizeof(max_align_t);
            TRY(keep_tensors(own, copy, row->fields, error));
        }
    }
    return ATTN_OK;
}

/* A scale on the host that is not 1. */
static bool is_scale(float host)
{
    return host != 0 && host != 1;
}

/* What a term of the layer needs and is not there, and what none reads. Scales of the cache of a
 * layer that skips its quantization are those of the model's other layers. */
static attn_status check_given(const struct attn_layer_desc *l, const struct attn_layer_params *p,
                               struct attn_error *error)
{
    static const struct attn_kv_quant_params none = {.v_channel_scale = NULL};
    const struct attn_kv_quant_params *quant = ext_find(p->next, ATTN_EXT_KV_QUANT_PARAMS);
    quant = quant != NULL ? quant : &none;
    const bool optional = quant->ext.flags & ATTN_EXT_OPTIONAL;
    const bool rows = layer_needs_quant_params(l), skips = l->skip_kv_quantization || optional;
    const int32_t k_dtype = kv_dtype_of(l, false), v_dtype = kv_dtype_of(l, true);
    const bool int4_k = rows && k_dtype == ATTN_KV_INT4_PER_TOKEN_HEAD;
    const bool int4_v = rows && v_dtype == ATTN_KV_INT4_PER_TOKEN_HEAD;
    const bool int8 = rows && v_dtype == ATTN_KV_INT8_KV, own = l->skip_kv_quantization;
    const bool k_scale = l->k_scale_form != ATTN_SCALE_NONE || k_dtype == ATTN_KV_NVFP4 || own;
    const bool v_scale = (l->v_scale_form != ATTN_SCALE_NONE && l->kind != ATTN_LAYER_MLA) ||
                         v_dtype == ATTN_KV_NVFP4 || own;
    const struct {
        const char *field;
        bool given, is_read;
        const char *reader;
        bool needed;
    } fields[] = {{"sinks", p->sinks != NULL, l->has_sinks, "has_sinks", l->has_sinks},
                  {"alibi_slopes", p->alibi_slopes != NULL, l->alibi, "alibi", l->alibi},
                  {"sink_k", p->sink_k != NULL, l->sink_len > 0, "sink_len"},
                  {"sink_v", p->sink_v != NULL, l->sink_len > 0, "sink_len"},
                  {"q_scale", p->q_scale != NULL, l->q_scale_form, "q_scale_form"},
                  {"k_scale", p->k_scale != NULL, k_scale, "k_scale_form"},
                  {"v_scale", p->v_scale != NULL, v_scale, "v_scale_form"},
                  {"p_scale", p->p_scale != NULL, l->p_scale_form, "p_scale_form"},
                  {"q_scale_host", is_scale(p->q_scale_host), l->q_scale_form, "q_scale_form"},
                  {"k_scale_host", is_scale(p->k_scale_host), k_scale, "k_scale_form"},
                  {"v_scale_host", is_scale(p->v_scale_host), v_scale, "v_scale_form"},
                  {"p_scale_host", is_scale(p->p_scale_host), l->p_scale_form, "p_scale_form"},
                  {"hadamard_signs_k", quant->hadamard_signs_k != NULL, int4_k || skips,
                   "kv_dtype int4_per_token_head", int4_k},
                  {"hadamard_signs_v", quant->hadamard_signs_v != NULL, int4_v || skips,
                   "kv_dtype int4_per_token_head", int4_v},
                  {"v_channel_scale", quant->v_channel_scale != NULL, int8 || skips,
                   "kv_dtype int8_kv", int8}};

    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        BAD_IF(fields[i].given ? !fields[i].is_read : fields[i].needed, fields[i].field,
               fields[i].given ? "layer '%s': %s is given; only a layer with %s reads it"
                               : "layer '%s': %s is NULL, and %s needs it",
               l->name, fields[i].field, fields[i].reader);
    }
    return ATTN_OK;
}

attn_status layer_bind_params(attn_layer *layer, const struct attn_layer_params *params,
                              struct attn_error *error)
{
    struct attn_layer_params read;
    BAD_IF(layer == NULL, "layer", "layer is NULL");
    const struct attn_layer_desc *l = layer->desc;
    TRY(struct_read(&read, ABI_LAYER_PARAMS, params, error));
    TRY(check_given(l, &read, error));
    TRY(ext_check_readers(read.next, ABI_LAYER_PARAMS, layer->selected->reads, l->name, error));
    CHECK_TENSOR_IF(l->sink_len > 0, read.sink_k, l->name, "sink_k", 3,
                    {l->sink_len, l->num_kv_heads, l->head_size}, 0, dtype_of_id(l->dtype));
    CHECK_TENSOR_IF(l->sink_len > 0, read.sink_v, l->name, "sink_v", 3,
                    {l->sink_len, l->num_kv_heads, l->head_size_v}, 0, dtype_of_id(l->dtype));
    TRY(layer_check_unplanned(layer, "layer_bind_params", error));
    TRY(address_check_device(layer->model, read.device, "attn_layer_params", error));
    TRY(address_check_all(layer->model, &read, ABI_LAYER_PARAMS, read.next, NULL, true, error));
    struct layer_params_copy *own =
        &layer->params_copies[layer->params == &layer->params_copies[0]];
    TRY(layer_params_copy_take(own, &read, error));
    struct layer_params_copy *before = layer->params;
    layer->params = own;
    attn_status status = layer_make_parts(layer, error);
    if (status == ATTN_OK) {
        layer_release_states(layer); /* kernels may have looked at the old ones */
    } else {
        layer->params = before;
        layer_make_parts(layer, NULL);
    }
    return status;
}

attn_status layer_amax(attn_layer *layer, const struct attn_amax_args *args,
                       struct attn_error *error)
{
    struct attn_amax_args read;
    struct attn_error why = ATTN_ERROR_INIT;
    TRY(struct_read(&read, ABI_AMAX_ARGS, args, error));
    BAD_IF(layer == NULL || read.out == NULL || read.instance != NULL, "out",
           "layer %p, out %p, instance %p; the first two are needed, and instance is NULL",
           (const void *)layer, (const void *)read.out, (const void *)read.instance);
    CHECK_TENSOR(read.x, layer->desc->name, "x", 3, {TENSOR_ANY, TENSOR_ANY, TENSOR_ANY}, 0,
                 TENSOR_NUMBERS);
    BAD_IF(read.history_len != 0, "history_len",
           "layer '%s': history_len is %d; 0, since the steps of a quantized encoder keep its "
           "history",
           layer->desc->name, read.history_len);
    const struct instance *instance = layer->served[ATTN_PHASE_PREFILL].instance;
    ERROR_IF(instance->kernels.amax == NULL, ATTN_ERROR_UNSUPPORTED, "amax", "%s has no amax",
             instance->caps->name);
    TRY(address_check_tensor(layer->model, read.x, "x", false, error));
    read.instance = instance->handle;
    return error_relay(error, instance->kernels.amax(&read, &why), &why);
}
