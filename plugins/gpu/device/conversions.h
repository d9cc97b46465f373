/* SPDX-License-Identifier: Apache-2.0 */
/* Conversions by integer arithmetic, for targets without instructions for them. Included by
 * target.h, after the target's float_bits and the rest. */
#ifndef GPU_DEVICE_CONVERSIONS_H
#define GPU_DEVICE_CONVERSIONS_H

#include "gpu/device/conversions_fp8.h"

GPU_INLINE float float_toward_zero(double x)
{
    float y = (float)x;
    return fabs((double)y) > fabs(x) ? bits_float(float_bits(y) - 1) : y;
}

GPU_INLINE uint16_t bf16_of(float x)
{
    uint32_t bits = float_bits(x);
    if (isnan(x)) {
        return (uint16_t)(bits >> 16 | 0x40);
    }
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

GPU_INLINE float float_of_bf16(uint16_t bits)
{
    return bits_float((uint32_t)bits << 16);
}

#endif
