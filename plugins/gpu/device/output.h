/* SPDX-License-Identifier: Apache-2.0 */
/* Quantization to an attn_output_form, for the quantize kernel and for epilogues. */
#ifndef GPU_DEVICE_OUTPUT_H
#define GPU_DEVICE_OUTPUT_H

#include "gpu/device/number.h"

#define LEAST_AMAX 1e-10f /* least amax of a group */

/* x / scale for a constant scale whose inverse is rounded; x is finite and not tiny. */
GPU_INLINE float divide_by(float x, float scale, float inverse)
{
    float q = x * inverse;
    return fmaf(fmaf(-q, scale, x), inverse, q);
}

/* The scale of a group; powers of two round up. */
GPU_INLINE float group_scale(float largest, int32_t pow2)
{
    const uint32_t mantissa = ((uint32_t)1 << 23) - 1;
    float scale = divide_by(fmaxf(largest, LEAST_AMAX), FP8_LARGEST, 1.0f / FP8_LARGEST);
    return pow2 ? bits_float((float_bits(scale) + mantissa) & ~mantissa) : scale;
}

/* nvfp4: the e4m3 code of inverse * largest / 6. */
GPU_INLINE uint8_t block_scale_code(float inverse, float largest)
{
    const number_divisor six = {6.0f, 1.0f / 6.0f, true, false};
    return number_to_fp8(ATTN_DTYPE_FP8_E4M3, divide_odd(inverse * largest, six));
}

/* e2m1 of x * inverse / scale, rounded half to even; by_scale is 1 / scale and is corrected here.
 * NaN becomes 0. */
GPU_INLINE uint32_t e2m1_of_ratio(float x, float inverse, float scale, float by_scale)
{
    const float unit = 4194304.0f; /* 2^22: adding it rounds to multiples of a half */
    float q = divide_by(fminf(fabsf(x) * inverse, 1e30f), scale, by_scale);
    uint32_t bits = float_bits(q), least = float_bits(q + unit) - float_bits(unit);
    uint32_t code = ((bits + 0x1fffff + (bits >> 22 & 1)) >> 22) - 252; /* leaves 2 bits */
    code = q < 1.0f ? least : code < 7 ? code : 7;
    return isnan(x) ? 0 : code | (signbit(x) ? 8u : 0u);
}

#endif
