/* SPDX-License-Identifier: Apache-2.0 */
#include "util/tensor.h"
#include "util/counts.h"

#include <attn/types.h>
#include <stddef.h>
#include <string.h>

static const struct attn_dtype dtypes[NUM_DTYPES] = {
    [ATTN_DTYPE_F16] = {ATTN_CODE_FLOAT, 16, 1},
    [ATTN_DTYPE_BF16] = {ATTN_CODE_BFLOAT, 16, 1},
    [ATTN_DTYPE_F32] = {ATTN_CODE_FLOAT, 32, 1},
    [ATTN_DTYPE_FP8_E4M3] = {ATTN_CODE_FLOAT8_E4M3FN, 8, 1},
    [ATTN_DTYPE_FP8_E5M2] = {ATTN_CODE_FLOAT8_E5M2, 8, 1},
    [ATTN_DTYPE_FP8_E4M3FNUZ] = {ATTN_CODE_FLOAT8_E4M3FNUZ, 8, 1},
    [ATTN_DTYPE_INT8] = {ATTN_CODE_INT, 8, 1}};

struct attn_dtype dtype_of_id(int32_t id)
{
    static const struct attn_dtype of_vendors = {ATTN_CODE_UINT, 8, 1};
    return id < NUM_DTYPES ? dtypes[id] : of_vendors;
}

int32_t dtype_id_of(struct attn_dtype dtype)
{
    for (int32_t id = ATTN_DTYPE_F16; id < NUM_DTYPES; id++) {
        if (memcmp(&dtype, &dtypes[id], sizeof dtype) == 0) {
            return id;
        }
    }
    return -1;
}

bool tensor_is(const struct attn_tensor *tensor, int32_t ndim, struct attn_dtype dtype)
{
    return tensor != NULL && tensor->shape != NULL && tensor->ndim == ndim &&
           memcmp(&tensor->dtype, &dtype, sizeof dtype) == 0;
}

bool tensor_is_numbers(const struct attn_tensor *tensor, int32_t ndim)
{
    return tensor != NULL && tensor->data != NULL && tensor->shape != NULL &&
           tensor->ndim == ndim && tensor_is_contiguous(tensor) && dtype_id_of(tensor->dtype) > 0;
}

bool tensor_is_floats(const struct attn_tensor *tensor, int32_t ndim)
{
    const bool there =
        tensor != NULL && tensor->data != NULL && tensor->shape != NULL && tensor->ndim == ndim;
    const int32_t dtype = there ? dtype_id_of(tensor->dtype) : -1;
    return dtype >= ATTN_DTYPE_F16 && dtype <= ATTN_DTYPE_F32;
}

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
