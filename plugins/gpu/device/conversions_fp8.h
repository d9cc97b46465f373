/* SPDX-License-Identifier: Apache-2.0 */
/* fp8 by integer arithmetic, for targets without instructions for it. Included by a target, after
 * float_bits and the rest. */
#ifndef GPU_DEVICE_CONVERSIONS_FP8_H
#define GPU_DEVICE_CONVERSIONS_FP8_H

/* To the nearest number of `fraction` bits whose least normal exponent is `least`, halves to even;
 * saturates at the code `largest`. x is no NaN. */
GPU_INLINE uint8_t small_float_of(float x, int32_t fraction, int32_t least, uint32_t largest)
{
    uint32_t bits = float_bits(x), size = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    int32_t exponent = (int32_t)(size >> 23) - 127;
    uint32_t code;
    if (exponent >= least) {
        int32_t drop = 23 - fraction;
        size += ((1u << drop) >> 1) - 1 + (size >> drop & 1);
        code = (size >> drop) - ((uint32_t)(least + 126) << fraction);
    } else { /* a multiple of the least number: adding rounds */
        float unit = bits_float((uint32_t)(least - fraction + 23 + 127) << 23);
        code = float_bits(bits_float(size) + unit) - float_bits(unit);
    }
    return (uint8_t)(sign | (code < largest ? code : largest));
}

GPU_INLINE uint8_t fp8_of(bool e5m2, float x)
{
    return e5m2 ? small_float_of(x, 2, -14, 0x7b) : small_float_of(x, 3, -6, 0x7e);
}

GPU_INLINE float float_of_fp8(bool e5m2, uint8_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x80) << 24, size = bits & 0x7f;
    if (e5m2) {
        return float_of_half_bits((uint16_t)(bits << 8));
    }
    if (size == 0x7f) {
        return bits_float(sign | 0x7fc00000u);
    }
    if (size < 8) { /* multiples of 2^-9 */
        return bits_float(sign | float_bits((float)size * 0.001953125f));
    }
    return bits_float(sign | ((size << 20) + (120u << 23)));
}

GPU_INLINE uint32_t fp8_pair_of(bool e5m2, float low, float high)
{
    return fp8_of(e5m2, low) | (uint32_t)fp8_of(e5m2, high) << 8;
}

#endif
