/* SPDX-License-Identifier: Apache-2.0 */
/* Elements of batched_gemm's operands as float32, for any type and strides. */
#ifndef GPU_DEVICE_MATRIX_H
#define GPU_DEVICE_MATRIX_H

#include "gpu/device/number.h"
#include "gpu/latent.h"

GPU_INLINE float gemm_number(const gpu_batch_matrix &m, int64_t b, int64_t i, int64_t j)
{
    int64_t at = b * m.batch + i * m.row + j * m.column;
    return number_load(m.data + at * number_bytes_of(m.dtype), m.dtype, 0);
}

/* An e2m1 of w times its block's power of two. */
GPU_INLINE float mxfp4_number(const gpu_gemm_params &p, int64_t b, int64_t i, int64_t j)
{
    int64_t at = b * p.w.batch + i * p.w.row + j * p.w.column;
    uint32_t code = ((const uint8_t *)p.w.data)[at / 2] >> (at & 1) * 4 & 15, size = code & 7;
    float x =
        size < 2 ? 0.5f * (float)size : bits_float(((size >> 1) + 126) << 23 | (size & 1) << 22);
    const gpu_batch_matrix &s = p.block_scale;
    const int64_t at_scale =
        b * s.batch + (int32_t)i / p.scale_rows * s.row + (int32_t)j / p.scale_columns * s.column;
    const float scale = e8m0_number(((const uint8_t *)s.data)[at_scale]);
    return (code & 8) != 0 ? -x * scale : x * scale;
}

GPU_INLINE float weight_number(const gpu_gemm_params &p, int64_t b, int64_t k, int64_t n)
{
    return p.block_scale.data != nullptr ? mxfp4_number(p, b, k, n) : gemm_number(p.w, b, k, n);
}

#endif
