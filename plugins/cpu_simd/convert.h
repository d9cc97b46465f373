/* SPDX-License-Identifier: Apache-2.0 */
/* One element at a time from float32 to storage types, for tails and for the scalar variant;
 * common/number.h has the other direction. Nothing here needs more than the baseline ISA. */
#ifndef CPU_SIMD_CONVERT_H
#define CPU_SIMD_CONVERT_H

#include "common/number.h"

/* Round to nearest even; a NaN stays a quiet NaN. */
static inline uint16_t f32_to_bf16(float value)
{
    uint32_t bits = number_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((bits >> 16) | 0x40u);
    }
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline uint16_t f32_to_f16(float value)
{
    uint32_t bits = number_bits(value);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return sign | 0x7e00u;
    }
    if (magnitude >= 0x47800000u) { /* 65536 and above */
        return sign | 0x7c00u;
    }
    if (magnitude < 0x38800000u) { /* subnormal: the adder rounds at the right place */
        float shifted = number_from_bits(magnitude) + 0.5f;
        return sign | (uint16_t)(number_bits(shifted) - 0x3f000000u);
    }
    magnitude += 0xfffu + ((magnitude >> 13) & 1u);
    return sign | (uint16_t)((magnitude - 0x38000000u) >> 13);
}

/* For rows whose sum of squares is no float. */
static inline double sum_of_squares(const float *row, int32_t n)
{
    double sum = 0;
    for (int32_t i = 0; i < n; i++) {
        sum += (double)row[i] * (double)row[i];
    }
    return sum;
}

#endif
