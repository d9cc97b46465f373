/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CORE_UTIL_TENSOR_H
#define CORE_UTIL_TENSOR_H

#include <attn/status.h>
#include <attn/tensor.h>
#include <stdbool.h>

/* Elements between neighbours in dimension `dim`; tensors without strides are compact. */
int64_t tensor_stride(const struct attn_tensor *tensor, int32_t dim);

/* The element [row, head, dim]: head is 0 in two dimensions, and the last is contiguous. */
uint8_t *tensor_element(const struct attn_tensor *tensor, int64_t row, int64_t head, int64_t dim);
/* The first element. */
static inline uint8_t *tensor_data(const struct attn_tensor *tensor)
{
    return (uint8_t *)tensor->data + tensor->byte_offset;
}

/* From an enum attn_dtype_id or a vendor's code, and back: -1 for what is not in that enum. */
struct attn_dtype dtype_of_id(int32_t id);
int32_t dtype_id_of(struct attn_dtype dtype);
/* A tensor with a shape and strides (elements) of its own. It must not move while it is used. */
#define TENSOR_MAX_DIMS 4
struct own_tensor {
    struct attn_tensor tensor;
    int64_t shape[TENSOR_MAX_DIMS], strides[TENSOR_MAX_DIMS];
};

/* What a tensor has to be; `name` is its field's. */
struct tensor_need {
    const char *name;
    int32_t ndim;
    int64_t shape[TENSOR_MAX_DIMS]; /* TENSOR_ANY: 0 or above */
    int32_t more;                   /* the dimension, from 1, that may be larger; 0: none */
    struct attn_dtype dtype;        /* zeroed: f16, bf16 or f32 */
    bool strided;                   /* the last dimension need not be contiguous */
};
#define TENSOR_ANY INT64_MIN
#define TENSOR_NUMBERS ((struct attn_dtype){1, 0, 0}) /* one of enum attn_dtype_id */
#define TENSOR_BYTES ((struct attn_dtype){2, 0, 0})   /* any */

/* Refuses a tensor that is missing, differs from `need`, or has no data where it may not be empty.
 * The error states what was found and what is needed, and names `layer` unless it is NULL. */
attn_status tensor_check(const struct attn_tensor *tensor, const struct tensor_need *need,
                         const char *layer, struct attn_error *error);

/* Ends the function with a refusal unless the tensor is what the fields of struct tensor_need that
 * follow say; the second checks it only where `read` holds. */
#define CHECK_TENSOR(tensor, layer, ...)                                                           \
    TRY(tensor_check(tensor, &(const struct tensor_need){__VA_ARGS__}, layer, error))
#define CHECK_TENSOR_IF(read, tensor, layer, ...)                                                  \
    TRY_IF(read, tensor_check(tensor, &(const struct tensor_need){__VA_ARGS__}, layer, error))
/* [a, b, c] at `data`, of the dtype and on the device of `like`. */
const struct attn_tensor *tensor_set(struct own_tensor *own, const struct attn_tensor *like,
                                     void *data, int64_t a, int64_t b, int64_t c, int64_t stride_a,
                                     int64_t stride_b, int64_t stride_c);
/* A tensor of up to TENSOR_MAX_DIMS dimensions with the strides of `source`, which may have none,
 * over the same memory. */
void tensor_copy(struct own_tensor *own, const struct attn_tensor *source);
/* [rows, heads, size] as by tensor_set, compact. */
const struct attn_tensor *tensor_set_rows(struct own_tensor *own, const struct attn_tensor *like,
                                          void *data, int64_t rows, int64_t heads, int64_t size);
/* [heads, tokens] float32 on the device of `like`: a log-sum-exp. */
const struct attn_tensor *tensor_set_lse(struct own_tensor *own, const struct attn_tensor *like,
                                         void *data, int64_t heads, int64_t tokens);

#endif
