/* SPDX-License-Identifier: Apache-2.0 */
#include "util/tensor.h"
#include "util/counts.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "util/error.h"

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

/* "float32", "bfloat16", or code and bits of one without a name here. */
static void dtype_text(struct attn_dtype dtype, char *text, size_t size)
{
    static const char *const names[] = {[ATTN_CODE_INT] = "int",
                                        [ATTN_CODE_UINT] = "uint",
                                        [ATTN_CODE_FLOAT] = "float",
                                        [ATTN_CODE_BFLOAT] = "bfloat"};
    if (dtype.bits == 0) {
        snprintf(text, size, "%s", dtype.code == 0 ? "f16, bf16 or f32" : "any dtype");
    } else if (dtype.code == ATTN_CODE_FLOAT8_E4M3FN || dtype.code == ATTN_CODE_FLOAT8_E5M2) {
        snprintf(text, size, "float8_%s", dtype.code == ATTN_CODE_FLOAT8_E5M2 ? "e5m2" : "e4m3fn");
    } else if (dtype.code < sizeof names / sizeof *names && names[dtype.code] != NULL) {
        snprintf(text, size, "%s%d", names[dtype.code], dtype.bits);
    } else {
        snprintf(text, size, "dtype code %d of %d bits", dtype.code, dtype.bits);
    }
    if (dtype.bits > 0 && dtype.lanes != 1) {
        const size_t used = strlen(text);
        snprintf(text + used, size - used, " in %d lanes", dtype.lanes);
    }
}

static void shape_text(const int64_t *shape, int32_t ndim, int32_t more, char *text, size_t size)
{
    size_t used = (size_t)snprintf(text, size, "[");
    for (int32_t i = 0; i < ndim && i < TENSOR_MAX_DIMS; i++) {
        char number[24];
        snprintf(number, sizeof number, "%lld", (long long)shape[i]);
        used += (size_t)snprintf(text + used, size - used, "%s%s%s", i > 0 ? ", " : "",
                                 shape[i] == TENSOR_ANY ? "any" : number,
                                 more == i + 1 ? " or more" : "");
    }
    snprintf(text + used, size - used, ndim > TENSOR_MAX_DIMS ? ", ...]" : "]");
}

static attn_status refuse(const struct attn_tensor *t, const struct tensor_need *need,
                          const char *layer, struct attn_error *error)
{
    char found[240] = "NULL", stride[48] = "", shape[140], have[48], dtype[48];
    if (t != NULL && t->shape != NULL) {
        const int64_t last = t->ndim > 0 && t->strides != NULL ? t->strides[t->ndim - 1] : 1;
        if (last != 1) {
            snprintf(stride, sizeof stride, " with a last stride of %lld", (long long)last);
        }
        shape_text(t->shape, t->ndim, 0, shape, sizeof shape);
        dtype_text(t->dtype, have, sizeof have);
        snprintf(found, sizeof found, "%s %s%s%s", shape, have, stride,
                 t->data == NULL ? " without data" : "");
    } else if (t != NULL) {
        snprintf(found, sizeof found, "without a shape of its %d dimensions", t->ndim);
    }
    shape_text(need->shape, need->ndim, need->more, shape, sizeof shape);
    dtype_text(need->dtype, dtype, sizeof dtype);
    return BAD(need->name, "%s%s%s%s is %s; %s %s%s is needed", layer != NULL ? "layer '" : "",
               layer != NULL ? layer : "", layer != NULL ? "': " : "", need->name, found, shape,
               dtype, need->strided ? "" : ", the last dimension contiguous,");
}

attn_status tensor_check(const struct attn_tensor *t, const struct tensor_need *need,
                         const char *layer, struct attn_error *error)
{
    bool good = t != NULL && t->shape != NULL && t->ndim == need->ndim, empty = false;
    if (good && need->dtype.bits > 0) {
        good = memcmp(&t->dtype, &need->dtype, sizeof t->dtype) == 0;
    } else if (good && need->dtype.code < 2) {
        const int32_t dtype = dtype_id_of(t->dtype);
        good = dtype > 0 && (dtype <= ATTN_DTYPE_F32 || need->dtype.code == 1);
    }
    good = good && (need->strided || t->strides == NULL || t->strides[t->ndim - 1] == 1);
    for (int32_t i = 0; good && i < need->ndim; i++) {
        const int64_t size = need->shape[i];
        const bool more = need->more == i + 1;
        good = size == TENSOR_ANY ? t->shape[i] >= 0
                                  : t->shape[i] == size || (more && t->shape[i] > size);
        empty |= more && size == 0;
    }
    return good && (t->data != NULL || empty) ? ATTN_OK : refuse(t, need, layer, error);
}

int64_t tensor_stride(const struct attn_tensor *tensor, int32_t dim)
{
    int64_t stride = 1;
    if (tensor->strides != NULL) {
        return tensor->strides[dim];
    }
    for (int32_t i = tensor->ndim - 1; i > dim; i--) {
        stride = (int64_t)((uint64_t)stride * (uint64_t)tensor->shape[i]); /* not yet checked */
    }
    return stride;
}

uint8_t *tensor_element(const struct attn_tensor *t, int64_t row, int64_t head, int64_t dim)
{
    const int64_t at = row * tensor_stride(t, 0) + head * tensor_stride(t, 1) + dim;
    return tensor_data(t) + at * (t->dtype.bits / 8);
}

void tensor_copy(struct own_tensor *own, const struct attn_tensor *source)
{
    own->tensor = *source;
    for (int32_t i = 0; i < source->ndim; i++) {
        own->shape[i] = source->shape[i];
        own->strides[i] = tensor_stride(source, i);
    }
    own->tensor.shape = own->shape;
    own->tensor.strides = own->strides;
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
