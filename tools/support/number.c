/* SPDX-License-Identifier: Apache-2.0 */
#include "number.h"
#include "random.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

static const struct {
    struct attn_dtype dtype;
    int32_t mantissa_bits; /* this and the next two: small float formats' */
    int32_t bias;
    double largest;
} formats[ATTN_DTYPE_INT8 + 1] = {
    [ATTN_DTYPE_F16] = {{ATTN_CODE_FLOAT, 16, 1}, 10, 15, 65504.0},
    [ATTN_DTYPE_BF16] = {{ATTN_CODE_BFLOAT, 16, 1}, 7, 127, 3.3895313892515355e38},
    [ATTN_DTYPE_F32] = {{ATTN_CODE_FLOAT, 32, 1}, 23, 127, 3.4028234663852886e38},
    [ATTN_DTYPE_FP8_E4M3] = {{ATTN_CODE_FLOAT8_E4M3FN, 8, 1}, 3, 7, 448.0},
    [ATTN_DTYPE_FP8_E5M2] = {{ATTN_CODE_FLOAT8_E5M2, 8, 1}, 2, 15, 57344.0},
    [ATTN_DTYPE_FP8_E4M3FNUZ] = {{ATTN_CODE_FLOAT8_E4M3FNUZ, 8, 1}, 3, 8, 240.0},
    [ATTN_DTYPE_INT8] = {{ATTN_CODE_INT, 8, 1}, 0, 0, 127.0},
};

struct attn_dtype number_dtype(int32_t dtype)
{
    return formats[dtype].dtype;
}

size_t number_bytes(int32_t dtype)
{
    return formats[dtype].dtype.bits / 8;
}

/* A normal one; ldexp is a call. */
static double power_of_two(int32_t exponent)
{
    uint64_t bits = (uint64_t)(1023 + exponent) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* Bits of a finite |value| in a small float: exponent and mantissa from an integer multiple of the
 * step at its exponent, so that a carry out of the mantissa lands in the exponent by itself. */
static uint32_t small_float_bits(double magnitude, int32_t mantissa_bits, int32_t bias)
{
    uint64_t bits;
    if (magnitude == 0) {
        return 0;
    }
    memcpy(&bits, &magnitude, sizeof bits);
    int32_t exponent = (int32_t)(bits >> 52) - 1023; /* magnitude in [2^exponent, 2^(exponent+1)) */
    if (exponent < 1 - bias) {
        exponent = 1 - bias;
    }
    double steps = nearbyint(magnitude * power_of_two(mantissa_bits - exponent));
    int32_t field = exponent + bias - 1;
    return ((uint32_t)field << mantissa_bits) + (uint32_t)steps;
}

void number_store(void *memory, int64_t at, int32_t dtype, double value)
{
    int32_t bits = formats[dtype].dtype.bits;
    double largest = formats[dtype].largest;
    uint32_t out;
    if (dtype == ATTN_DTYPE_F32) {
        ((float *)memory)[at] = (float)value;
        return;
    }
    if (dtype == ATTN_DTYPE_INT8) {
        value = value > 127 ? 127 : value < -128 ? -128 : nearbyint(value);
        ((int8_t *)memory)[at] = (int8_t)value;
        return;
    }
    if (isnan(value)) {
        /* 16 bits of ones are what attn-check fills unwritten memory with */
        out = (1u << bits) - (bits == 16 ? 2 : 1);
        out = dtype == ATTN_DTYPE_FP8_E4M3FNUZ ? 0x80 : out;
    } else {
        const int32_t mantissa_bits = formats[dtype].mantissa_bits;
        double magnitude = fabs(value) > largest ? largest : fabs(value);
        out = bits == 16 && isinf(value)
                  ? (1u << 15) - (1u << mantissa_bits)
                  : small_float_bits(magnitude, mantissa_bits, formats[dtype].bias);
        bool signed_zero = dtype != ATTN_DTYPE_FP8_E4M3FNUZ;
        out |= signbit(value) && (out != 0 || signed_zero) ? 1u << (bits - 1) : 0;
    }
    if (bits == 16) {
        ((uint16_t *)memory)[at] = (uint16_t)out;
    } else {
        ((uint8_t *)memory)[at] = (uint8_t)out;
    }
}

double number_load(const void *memory, int64_t at, int32_t dtype)
{
    int32_t bits = formats[dtype].dtype.bits;
    int32_t mantissa_bits = formats[dtype].mantissa_bits;
    if (dtype == ATTN_DTYPE_F32) {
        return ((const float *)memory)[at];
    }
    if (dtype == ATTN_DTYPE_INT8) {
        return ((const int8_t *)memory)[at];
    }
    if (dtype == ATTN_DTYPE_BF16) { /* the upper half of a float32; for speed */
        uint32_t wide = (uint32_t)((const uint16_t *)memory)[at] << 16;
        float value;
        memcpy(&value, &wide, sizeof value);
        return value;
    }
    uint32_t raw = bits == 16 ? ((const uint16_t *)memory)[at] : ((const uint8_t *)memory)[at];
    uint32_t magnitude = raw & ((1u << (bits - 1)) - 1);
    uint32_t field = magnitude >> mantissa_bits;
    uint32_t fraction = magnitude & ((1u << mantissa_bits) - 1);
    uint32_t top = (1u << (bits - 1 - mantissa_bits)) - 1;
    double value;
    if (dtype == ATTN_DTYPE_FP8_E4M3FNUZ) {
        if (raw == 0x80) {
            return NAN;
        }
    } else if (dtype == ATTN_DTYPE_FP8_E4M3) {
        if (magnitude == 0x7f) {
            return NAN;
        }
    } else if (field == top) {
        value = fraction ? NAN : INFINITY;
        return raw >> (bits - 1) ? -value : value;
    }
    value = (fraction + (field > 0 ? 1u << mantissa_bits : 0)) *
            power_of_two((int32_t)(field > 0 ? field : 1) - formats[dtype].bias - mantissa_bits);
    return raw >> (bits - 1) ? -value : value;
}

void number_fill_normal(void *memory, int64_t first, int64_t count, int32_t dtype, double deviation,
                        uint64_t *random)
{
    for (int64_t i = first; i < first + count; i++) {
        number_store(memory, i, dtype, deviation * random_normal(random));
    }
}

double number_round(double value, int32_t dtype)
{
    uint32_t element;
    number_store(&element, 0, dtype, value);
    return number_load(&element, 0, dtype);
}
