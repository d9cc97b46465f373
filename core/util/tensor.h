/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CORE_UTIL_TENSOR_H
#define CORE_UTIL_TENSOR_H

#include <attn/tensor.h>

/* Elements between neighbours in dimension `dim`; tensors without strides are compact. */
int64_t tensor_stride(const struct attn_tensor *tensor, int32_t dim);

#endif
