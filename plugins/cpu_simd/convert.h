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
    /* as if the exponent had float32's bias, then scaled back: subnormals come right too */
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

/* Saturating, round to nearest even, for a value in units of the type. `mantissa` bits, smallest
 * normal exponent `emin`, largest finite value `limit` with code `limit_code`. */
static inline uint8_t f32_to_fp8(float value, int mantissa, int emin, float limit,
                                 uint8_t limit_code)
{
    uint32_t bits = f32_to_bits(value);
    uint8_t sign = (uint8_t)((bits >> 24) & 0x80u);
    float magnitude = bits_to_f32(bits & 0x7fffffffu);
    if (magnitude != magnitude) {
        return sign | 0x7fu;
    }
    if (magnitude >= limit) {
        return sign | limit_code;
    }
    int exponent = (int)((bits >> 23) & 0xffu) - 127;
    if (exponent < emin) { /* subnormal: add a number whose last bit is the smallest step */
        float magic = bits_to_f32((uint32_t)(emin - mantissa + 23 + 127) << 23);
        return sign | (uint8_t)(f32_to_bits(magnitude + magic) - f32_to_bits(magic));
    }
    uint32_t shift = (uint32_t)(23 - mantissa);
    uint32_t rounded = (bits & 0x7fffffffu) + (1u << (shift - 1)) - 1 + ((bits >> shift) & 1u);
    uint32_t code = (rounded >> shift) - ((uint32_t)(emin - 1 + 127) << mantissa);
    return sign | (uint8_t)(code > limit_code ? limit_code : code);
}

/* Rounded to odd, so that a second rounding to fewer bits is that of the double: a quotient just
 * beside the middle of two codes does not become the middle. */
static inline float f64_to_f32_odd(double value)
{
    float nearest = (float)value;
    if (nearest == value || nearest != nearest) {
        return nearest;
    }
    uint32_t bits = f32_to_bits(nearest);
    double magnitude = value < 0 ? -value : value;
    if ((double)bits_to_f32(bits & 0x7fffffffu) > magnitude) {
        bits--;
    }
    return bits_to_f32(bits | 1u);
}

static inline uint8_t f32_to_e4m3(float value)
{
    return f32_to_fp8(value, 3, -6, 448.0f, 0x7e);
}

static inline uint8_t f32_to_e5m2(float value)
{
    return f32_to_fp8(value, 2, -14, 57344.0f, 0x7b);
}

#endif
