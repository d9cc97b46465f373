/* SPDX-License-Identifier: Apache-2.0 */
/* A tensor of host memory together with the arrays that it points to. */
#ifndef SUPPORT_TENSOR_H
#define SUPPORT_TENSOR_H

#include <attn/tensor.h>

#define SHAPED_DIMS 5

struct shaped {
    struct attn_tensor tensor;
    int64_t shape[SHAPED_DIMS], strides[SHAPED_DIMS];
};

/* `ndim` sizes, and strides in elements (NULL: dense); `dtype` is an enum attn_dtype_id. Returns
 * the tensor, which stays valid as long as *shaped stays in its place. */
struct attn_tensor *shaped_set(struct shaped *shaped, void *data, int32_t dtype, int32_t ndim,
                               const int64_t *shape, const int64_t *strides);

#endif
