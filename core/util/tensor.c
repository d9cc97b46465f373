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
