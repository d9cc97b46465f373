/* SPDX-License-Identifier: Apache-2.0 */
/* Quantization of attention outputs, shared by the epilogues. */
#ifndef CUDA_FLASH_STORE_CODES_CUH
#define CUDA_FLASH_STORE_CODES_CUH

#include <attn/types.h>

#include "cuda_flash/ptx/ptx.cuh"
#include "gpu/device/output.h"
#include "gpu/output.h"

/* Converts to two e4m3. NaN stays NaN, which the integer conversion does not handle. */
GPU_INLINE uint32_t e4m3_pair(float low, float high)
{
#if __CUDA_ARCH__ >= 890
    return fp8_pair_of(false, low, high);
#else
    return number_to_fp8(ATTN_DTYPE_FP8_E4M3, low) |
           (uint32_t)number_to_fp8(ATTN_DTYPE_FP8_E4M3, high) << 8;
#endif
}

/* Quantizes N elements that a lane has of a row, from dim `d` of `head` on, and stores them at
 * `to`, aligned to 4 bytes (nvfp4 of 4 elements: 2). All lanes of the warp call, neighbouring lanes
 * have neighbouring dims, and a quantization group is in range or out of range as a whole. Division
 * multiplies with the rounded reciprocal, while `quantize` rounds once: the codes differ if a
 * quotient is within 2^-23 of the midpoint of two codes. */
template <int N>
GPU_INLINE void store_codes(const gpu_output &out, int64_t token, int32_t head, int32_t d,
                            bool is_there, const float (&x)[N], char *to)
{
    float scale = 1.0f, inverse = out.scale != nullptr ? *out.scale : 1.0f;
    if (out.form == ATTN_OUTPUT_FP8_STATIC) {
        scale = inverse;
    } else {
        float largest = 0.0f;
#pragma unroll
        for (int e = 0; e < N; e++) {
            largest = fmaxf(largest, fabsf(x[e])); /* ignores NaN */
        }
        for (int lanes = (1 << out.shift) / (2 * N); lanes > 0; lanes >>= 1) {
            largest = fmaxf(largest, lane_xor(largest, lanes));
        }
        int32_t group = (head * out.dims + d) >> out.shift;
        int64_t at = token * out.scale_row + group * out.scale_column;
        bool is_first = is_there && (d & ((1 << out.shift) - 1)) == 0;
        if (out.form == ATTN_OUTPUT_NVFP4) {
            uint8_t code = block_scale_code(inverse, largest);
            scale = number_load((const char *)&code, ATTN_DTYPE_FP8_E4M3, 0);
            if (is_first) {
                ((uint8_t *)out.block_scales)[at] = code;
            }
        } else {
            scale = group_scale(largest, out.pow2);
            if (is_first) {
                ((float *)out.block_scales)[at] = scale;
            }
        }
    }
    if (out.form == ATTN_OUTPUT_NVFP4) {
        const float by_scale = scale == 0.0f ? 0.0f : fast_reciprocal(scale);
        uint32_t word = 0;
#pragma unroll
        for (int e = 0; e < N; e++) {
            word |= e2m1_of_ratio(x[e], inverse, scale, by_scale) << 4 * e;
        }
        if (is_there && N == 8) {
            *(uint32_t *)to = word;
        } else if (is_there) {
            *(uint16_t *)to = (uint16_t)word;
        }
        return;
    }
    inverse = fast_reciprocal(scale);
#pragma unroll
    for (int e = 0; e < N; e += 4) {
        float q[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            q[i] = x[e + i] * inverse;
        }
        if (is_there) {
            *(uint32_t *)(to + e) = e4m3_pair(q[0], q[1]) | e4m3_pair(q[2], q[3]) << 16;
        }
    }
}

#endif
