/* SPDX-License-Identifier: Apache-2.0 */
/* One element at a time between the storage types and float32, for tails and for the scalar
 * variant. Nothing here needs more than the baseline ISA. */
#ifndef CPU_SIMD_CONVERT_H
#define CPU_SIMD_CONVERT_H

#include <stdint.h>
#include <string.h>

static inline float bits_to_f32(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t f32_to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float bf16_to_f32(uint16_t x)
{
    return bits_to_f32((uint32_t)x << 16);
}

/* Round to nearest even; a NaN stays a quiet NaN. */
static inline uint16_t f32_to_bf16(float value)
{
    uint32_t bits = f32_to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((bits >> 16) | 0x40u);
    }
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float f16_to_f32(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16;
    uint32_t magnitude = x & 0x7fffu;
    if (magnitude >= 0x7c00u) {
        return bits_to_f32(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    }
    /* with float32's exponent bias, then scaled back: subnormals come out right too */
    float value = bits_to_f32(magnitude << 13) * 0x1p112f;
    return bits_to_f32(sign | f32_to_bits(value));
}

static inline uint16_t f32_to_f16(float value)
{
    uint32_t bits = f32_to_bits(value);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return sign | 0x7e00u;
    }
    if (magnitude >= 0x47800000u) { /* 65536 and above */
        return sign | 0x7c00u;
    }
    if (magnitude < 0x38800000u) { /* subnormal: the adder rounds at the right place */
        float shifted = bits_to_f32(magnitude) + 0.5f;
        return sign | (uint16_t)(f32_to_bits(shifted) - 0x3f000000u);
    }
    magnitude += 0xfffu + ((magnitude >> 13) & 1u);
    return sign | (uint16_t)((magnitude - 0x38000000u) >> 13);
}

static inline float e5m2_to_f32(uint8_t x)
{
    return f16_to_f32((uint16_t)(x << 8));
}

static inline float e4m3_to_f32(uint8_t x)
{
    if ((x & 0x7fu) == 0x7fu) {
        return bits_to_f32(0x7fc00000u);
    }
    return f16_to_f32((uint16_t)(((x & 0x80u) << 8) | ((x & 0x7fu) << 7))) * 256.0f;
}

#endif
