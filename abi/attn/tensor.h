/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors, laid out as DLPack's DLTensor, and its type and device codes.
 * Source: DLPack 1.1, include/dlpack/dlpack.h (DLDeviceType, DLDataTypeCode, DLTensor). */
#ifndef ATTN_TENSOR_H
#define ATTN_TENSOR_H

#include "version.h"

/* DLDeviceType. A plugin may report every type from 1 on but those of host memory: those of this
 * list, DLPack's others (8 for Metal, 16 for Hexagon), and from ATTN_DEVICE_VENDOR on a vendor's
 * own. What an address, a stream and a native handle are on a device that is not in this list is
 * the vendor's to say. */
#define ATTN_DEVICE_VENDOR 0x10000
enum attn_device_type {
    ATTN_DEVICE_CPU = 1,
    ATTN_DEVICE_CUDA = 2,
    ATTN_DEVICE_CUDA_HOST = 3,
    ATTN_DEVICE_ROCM = 10,
    ATTN_DEVICE_ROCM_HOST = 11,
    ATTN_DEVICE_EXTENSION = 12, /* kDLExtDev: a device under test */
    ATTN_DEVICE_CUDA_MANAGED = 13,
    ATTN_DEVICE_ONEAPI = 14
};

/* DLDataTypeCode */
enum attn_dtype_code {
    ATTN_CODE_INT = 0,
    ATTN_CODE_UINT = 1,
    ATTN_CODE_FLOAT = 2,
    ATTN_CODE_BFLOAT = 4,
    ATTN_CODE_BOOL = 6,
    ATTN_CODE_FLOAT8_E4M3FN = 10,
    ATTN_CODE_FLOAT8_E4M3FNUZ = 11,
    ATTN_CODE_FLOAT8_E5M2 = 12,
    ATTN_CODE_FLOAT8_E5M2FNUZ = 13,
    ATTN_CODE_FLOAT8_E8M0FNU = 14,
    ATTN_CODE_FLOAT4_E2M1FN = 17
};

struct attn_device {
    int32_t type; /* enum attn_device_type */
    int32_t id;
};

struct attn_dtype {
    uint8_t code; /* enum attn_dtype_code */
    uint8_t bits;
    uint16_t lanes; /* 1 */
};

/* `data` on a device is its 64-bit address, as the driver gives it, and no host pointer. Strides
 * count elements; NULL strides mean compact row-major. The first element lies at data +
 * byte_offset. Data, shape and strides are borrowed until the call returns (data of a device: until
 * its stream is done). */
struct attn_tensor {
    void *data;
    struct attn_device device;
    int32_t ndim;
    struct attn_dtype dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
};

ATTN_STATIC_ASSERT(sizeof(struct attn_device) == 8, "as DLDevice");
ATTN_STATIC_ASSERT(sizeof(struct attn_dtype) == 4, "as DLDataType");
ATTN_STATIC_ASSERT(sizeof(struct attn_tensor) == 48, "as DLTensor");
ATTN_STATIC_ASSERT(offsetof(struct attn_tensor, device) == 8, "as DLTensor");
ATTN_STATIC_ASSERT(offsetof(struct attn_tensor, ndim) == 16, "as DLTensor");
ATTN_STATIC_ASSERT(offsetof(struct attn_tensor, dtype) == 20, "as DLTensor");
ATTN_STATIC_ASSERT(offsetof(struct attn_tensor, shape) == 24, "as DLTensor");
ATTN_STATIC_ASSERT(offsetof(struct attn_tensor, strides) == 32, "as DLTensor");
ATTN_STATIC_ASSERT(offsetof(struct attn_tensor, byte_offset) == 40, "as DLTensor");

/* Element types as small codes, for masks in capabilities: bit 1 << ATTN_DTYPE_F16 and so on. The
 * first six are enum attn_kv_dtype's. */
enum attn_dtype_id {
    ATTN_DTYPE_DEFAULT = 0, /* what the field says; where it says nothing a dtype is required */
    ATTN_DTYPE_F16 = 1,
    ATTN_DTYPE_BF16 = 2,
    ATTN_DTYPE_F32 = 3,
    ATTN_DTYPE_FP8_E4M3 = 4,
    ATTN_DTYPE_FP8_E5M2 = 5,
    ATTN_DTYPE_FP8_E4M3FNUZ = 6,
    ATTN_DTYPE_INT8 = 7,
    /* weights (mla.h) in e2m1, with an e8m0 scale for each 32 elements */
    ATTN_DTYPE_MXFP4 = 16
};

#endif
