/* SPDX-License-Identifier: Apache-2.0 */
#include "util/tensor.h"

#include <stddef.h>

int64_t tensor_stride(const struct attn_tensor *tensor, int32_t dim)
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

const struct attn_tensor *tensor_set(struct own_tensor *own, const struct attn_tensor *like,
                                     void *data, int64_t a, int64_t b, int64_t c, int64_t stride_a,
                                     int64_t stride_b, int64_t stride_c)
{
    *own = (struct own_tensor){{data, like->device, 3, like->dtype, own->shape, own->strides, 0},
                               {a, b, c},
                               {stride_a, stride_b, stride_c}};
    return &own->tensor;
}

const struct attn_tensor *tensor_set_rows(struct own_tensor *own, const struct attn_tensor *like,
                                          void *data, int64_t rows, int64_t heads, int64_t size)
{
    return tensor_set(own, like, data, rows, heads, size, heads * size, size, 1);
}

const struct attn_tensor *tensor_set_lse(struct own_tensor *own, const struct attn_tensor *like,
                                         void *data, int64_t heads, int64_t tokens)
{
    tensor_set(own, like, data, heads, tokens, 0, tokens, 1, 0);
    own->tensor.ndim = 2;
    own->tensor.dtype = (struct attn_dtype){ATTN_CODE_FLOAT, 32, 1};
    return &own->tensor;
}
