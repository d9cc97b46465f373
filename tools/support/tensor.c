/* SPDX-License-Identifier: Apache-2.0 */
#include "tensor.h"

#include <string.h>

#include "number.h"

struct attn_tensor *shaped_set(struct shaped *shaped, void *data, int32_t dtype, int32_t ndim,
                               const int64_t *shape, const int64_t *strides)
{
    memcpy(shaped->shape, shape, (size_t)ndim * sizeof *shape);
    if (strides != NULL) {
        memcpy(shaped->strides, strides, (size_t)ndim * sizeof *strides);
    }
    shaped->tensor = (struct attn_tensor){.data = data,
                                          .device = {ATTN_DEVICE_CPU, 0},
                                          .ndim = ndim,
                                          .dtype = number_dtype(dtype),
                                          .shape = shaped->shape,
                                          .strides = strides != NULL ? shaped->strides : NULL};
    return &shaped->tensor;
}
