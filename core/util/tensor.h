/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CORE_UTIL_TENSOR_H
#define CORE_UTIL_TENSOR_H

#include <attn/tensor.h>
#include <stdbool.h>

/* Elements between neighbours in dimension `dim`; tensors without strides are compact. */
int64_t tensor_stride(const struct attn_tensor *tensor, int32_t dim);

/* From an enum attn_dtype_id or a vendor's code, and back: -1 for what is not in that enum. */
struct attn_dtype dtype_of_id(int32_t id);
int32_t dtype_id_of(struct attn_dtype dtype);
/* Is it there, with a shape of `ndim` dimensions, and of that dtype? */
bool tensor_is(const struct attn_tensor *tensor, int32_t ndim, struct attn_dtype dtype);
/* Is it there, of `ndim` dimensions whose last one is contiguous, and of one of those dtypes? */
bool tensor_is_numbers(const struct attn_tensor *tensor, int32_t ndim);
/* Is it there, of `ndim` dimensions in any strides, and of f16, bf16 or f32? */
bool tensor_is_floats(const struct attn_tensor *tensor, int32_t ndim);
/* Has it strides of 1 in its last dimension? */
static inline bool tensor_is_contiguous(const struct attn_tensor *tensor)
{
    return tensor->strides == NULL || tensor->strides[tensor->ndim - 1] == 1;
}

/* A tensor with a shape and strides (elements) of its own. It must not move while it is used. */
#define TENSOR_MAX_DIMS 4
struct own_tensor {
    struct attn_tensor tensor;
    int64_t shape[TENSOR_MAX_DIMS], strides[TENSOR_MAX_DIMS];
};

/* [a, b, c] at `data`, of the dtype and on the device of `like`. */
const struct attn_tensor *tensor_set(struct own_tensor *own, const struct attn_tensor *like,
                                     void *data, int64_t a, int64_t b, int64_t c, int64_t stride_a,
                                     int64_t stride_b, int64_t stride_c);
/* The same, compact. */
const struct attn_tensor *tensor_set_rows(struct own_tensor *own, const struct attn_tensor *like,
                                          void *data, int64_t rows, int64_t heads, int64_t size);
/* [heads, tokens] float32 on the device of `like`: a log-sum-exp. */
const struct attn_tensor *tensor_set_lse(struct own_tensor *own, const struct attn_tensor *like,
                                         void *data, int64_t heads, int64_t tokens);

#endif
