/* SPDX-License-Identifier: Apache-2.0 */
#include "bind/layer_params_copy.h"

#include <string.h>

#include "util/structs.h"

/* Replaces the tensor of a field by a copy with strides of its own. NULL stays NULL. */
static attn_status keep_tensor(struct layer_params_copy *own, void *ours,
                               const struct abi_field *field, struct attn_error *error)
{
    const struct attn_tensor *source = field_pointer(ours, field);
    if (source == NULL) {
        return ATTN_OK;
    }
    if (source->ndim < 1 || source->ndim > TENSOR_MAX_DIMS || source->shape == NULL ||
        source->data == NULL) {
        return BAD(
            field->name,
            "%s has %d dimensions, shape %p, data %p; 1 to %d dimensions, and neither may be NULL",
            field->name, source->ndim, (const void *)source->shape, source->data, TENSOR_MAX_DIMS);
    }
    struct own_tensor *copy = &own->tensors[own->num_tensors++];
    const struct attn_tensor *pointer = &copy->tensor;
    copy->tensor = *source;
    for (int32_t i = 0; i < source->ndim; i++) {
        copy->shape[i] = source->shape[i];
        copy->strides[i] = tensor_stride(source, i);
    }
    copy->tensor.shape = copy->shape;
    copy->tensor.strides = copy->strides;
    memcpy((char *)ours + field->at, &pointer, sizeof pointer);
    return ATTN_OK;
}

static attn_status keep_tensors(struct layer_params_copy *own, void *ours,
                                const struct abi_field *field, struct attn_error *error)
{
    for (; field->name != NULL; field++) {
        if (field->kind == FIELD_TENSOR) {
            TRY(keep_tensor(own, ours, field, error));
        }
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
