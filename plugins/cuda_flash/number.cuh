/* SPDX-License-Identifier: Apache-2.0 */
/* Elements of any type the backend holds, to and from float32. fp8 saturates. */
#ifndef CUDA_FLASH_NUMBER_CUH
#define CUDA_FLASH_NUMBER_CUH

#include <attn/tensor.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

static __device__ __forceinline__ float number_load(const char *row, int32_t dtype, int32_t d)
{
    switch (dtype) {
    case ATTN_DTYPE_F16:
        return __half2float(((const __half *)row)[d]);
    case ATTN_DTYPE_BF16:
        return __bfloat162float(((const __nv_bfloat16 *)row)[d]);
    case ATTN_DTYPE_FP8_E4M3:
    case ATTN_DTYPE_FP8_E5M2:
        return __half2float(__half(__nv_cvt_fp8_to_halfraw(
            ((const uint8_t *)row)[d], dtype == ATTN_DTYPE_FP8_E5M2 ? __NV_E5M2 : __NV_E4M3)));
    default:
        return ((const float *)row)[d];
    }
}

static __device__ __forceinline__ void number_store(char *row, int32_t dtype, int32_t d, float x)
{
    switch (dtype) {
    case ATTN_DTYPE_F16:
        ((__half *)row)[d] = __float2half_rn(x);
        break;
    case ATTN_DTYPE_BF16:
        ((__nv_bfloat16 *)row)[d] = __float2bfloat16_rn(x);
        break;
    case ATTN_DTYPE_FP8_E4M3:
    case ATTN_DTYPE_FP8_E5M2:
        ((uint8_t *)row)[d] = __nv_cvt_float_to_fp8(
            x, __NV_SATFINITE, dtype == ATTN_DTYPE_FP8_E5M2 ? __NV_E5M2 : __NV_E4M3);
        break;
    default:
        ((float *)row)[d] = x;
        break;
    }
}

#endif
