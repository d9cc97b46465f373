#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every public header compiles alone, as C11 and as C++17, without a warning; and tensors are laid out as DLPack's.
set -eu
abi=$1
warnings="-Wall -Wextra -Wpedantic -Werror -fsyntax-only"
for header in "$abi"/attn/*.h "$abi"/attn/draft/*.h; do
    # shellcheck disable=SC2086
    echo "#include \"$header\"" | cc -std=c11 $warnings -x c -
    # shellcheck disable=SC2086
    echo "#include \"$header\"" | c++ -std=c++17 $warnings -x c++ -
done
[ -e /usr/include/dlpack/dlpack.h ] || exit 77
cc -std=c11 -fsyntax-only -I "$abi" -x c - <<'C'
#include <attn/tensor.h>
#include <dlpack/dlpack.h>
#define SAME(ours, theirs) _Static_assert((ours) == (theirs), #ours)
#define FIELD(field) SAME(offsetof(struct attn_tensor, field), offsetof(DLTensor, field))
SAME(sizeof(struct attn_tensor), sizeof(DLTensor));
SAME(sizeof(struct attn_dtype), sizeof(DLDataType));
SAME(sizeof(struct attn_device), sizeof(DLDevice));
FIELD(data);
FIELD(device);
FIELD(ndim);
FIELD(dtype);
FIELD(shape);
FIELD(strides);
FIELD(byte_offset);
SAME(offsetof(struct attn_dtype, code), offsetof(DLDataType, code));
SAME(offsetof(struct attn_dtype, bits), offsetof(DLDataType, bits));
SAME(offsetof(struct attn_dtype, lanes), offsetof(DLDataType, lanes));
SAME(ATTN_DEVICE_CPU, kDLCPU);
SAME(ATTN_DEVICE_CUDA, kDLCUDA);
SAME(ATTN_DEVICE_CUDA_HOST, kDLCUDAHost);
SAME(ATTN_DEVICE_ROCM, kDLROCM);
SAME(ATTN_CODE_INT, kDLInt);
SAME(ATTN_CODE_UINT, kDLUInt);
SAME(ATTN_CODE_FLOAT, kDLFloat);
SAME(ATTN_CODE_BFLOAT, kDLBfloat);
C
