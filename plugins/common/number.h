/* SPDX-License-Identifier: Apache-2.0 */
/* Number formats of CPU backends: single values and rows, plain C. Decoding is exact; encoding
 * rounds to nearest even. */
#ifndef PLUGINS_COMMON_NUMBER_H
#define PLUGINS_COMMON_NUMBER_H

#include <attn/layer.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

static inline float number_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t number_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* A small float's exponent and mantissa, moved to where binary32 has them and scaled by the
 * difference of the biases: subnormals come out right by themselves. */
static inline float number_from_f16(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000) << 16;
    if ((x & 0x7c00) == 0x7c00) {
        return number_from_bits(sign | 0x7f800000u | (uint32_t)(x & 0x3ff) << 13);
    }
    float magnitude = number_from_bits((uint32_t)(x & 0x7fff) << 13) * 0x1p112f;
    return number_from_bits(sign | number_bits(magnitude));
}

static inline float number_from_bf16(uint16_t x)
{
    return number_from_bits((uint32_t)x << 16);
}

static inline float number_from_e4m3(uint8_t x)
{
    if ((x & 0x7f) == 0x7f) {
        return NAN;
    }
    float magnitude = number_from_bits((uint32_t)(x & 0x7f) << 20) * 0x1p120f;
    return x & 0x80 ? -magnitude : magnitude;
}

static inline float number_from_e4m3fnuz(uint8_t x)
{
    if (x == 0x80) {
        return NAN;
    }
    float magnitude = number_from_bits((uint32_t)(x & 0x7f) << 20) * 0x1p119f;
    return x & 0x80 ? -magnitude : magnitude;
}

static inline float number_from_e5m2(uint8_t x)
{
    return number_from_f16((uint16_t)((uint16_t)x << 8));
}

/* The low four bits of x. */
static inline float number_from_e2m1(uint8_t x)
{
    static const float values[16] = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                     -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return values[x & 15];
}

/* |value| <= the format's largest, finite. A carry out of the mantissa lands in the exponent. */
static inline uint32_t number_small_bits(double magnitude, int32_t mantissa_bits, int32_t bias)
{
    uint64_t bits;
    if (magnitude == 0) {
        return 0;
    }
    memcpy(&bits, &magnitude, sizeof bits);
    int32_t exponent =
        (int32_t)(bits >> 52) - 1023; /* magnitude in [2^exponent, 2^(exponent + 1)) */
    exponent = exponent < 1 - bias ? 1 - bias : exponent;
    double per_unit;
    bits = (uint64_t)(1023 + mantissa_bits - exponent) << 52;
    memcpy(&per_unit, &bits, sizeof per_unit);
    double steps = magnitude * per_unit + 0x1p52 - 0x1p52; /* to nearest even */
    return ((uint32_t)(exponent + bias - 1) << mantissa_bits) + (uint32_t)steps;
}

/* Sizes above `most` become it. */
static inline uint32_t number_code(double value, uint32_t sign, uint32_t nan, double most,
                                   int32_t mantissa_bits, int32_t bias)
{
    const double size = fmin(fabs(value), most);
    const uint32_t code = isnan(value) ? nan : number_small_bits(size, mantissa_bits, bias);
    return code | (signbit(value) ? sign : 0);
}

/* The power of two after the largest number has infinity's code. */
static inline uint16_t number_to_f16(double value)
{
    return (uint16_t)number_code(value, 0x8000, 0x7e00, 0x1p16, 10, 15);
}

static inline uint16_t number_to_bf16(double value)
{
    return (uint16_t)number_code(value, 0x8000, 0x7fc0, 0x1p128, 7, 127);
}

/* Saturating: never NaN or infinity from a finite value. Infinities saturate too; NaN stays NaN. */
static inline uint8_t number_to_e4m3(double value)
{
    return (uint8_t)number_code(value, 0x80, 0x7f, 448.0, 3, 7);
}

static inline uint8_t number_to_e4m3fnuz(double value)
{
    if (isnan(value)) {
        return 0x80;
    }
    uint8_t magnitude = (uint8_t)number_small_bits(fmin(fabs(value), 240.0), 3, 8);
    return magnitude != 0 && signbit(value) ? magnitude | 0x80 : magnitude;
}

static inline uint8_t number_to_e5m2(double value)
{
    return (uint8_t)number_code(value, 0x80, 0x7e, 57344.0, 2, 15);
}

static inline uint8_t number_to_e2m1(double value)
{
    return (uint8_t)(number_small_bits(fmin(fabs(value), 6.0), 1, 1) | (signbit(value) ? 8 : 0));
}

/* enum attn_dtype_id of a DLPack dtype, or -1. */
static inline int32_t number_dtype_name(struct attn_dtype dtype)
{
    if (dtype.lanes != 1) {
        return -1;
    }
    switch (dtype.code << 8 | dtype.bits) {
    case ATTN_CODE_FLOAT << 8 | 16:
        return ATTN_DTYPE_F16;
    case ATTN_CODE_BFLOAT << 8 | 16:
        return ATTN_DTYPE_BF16;
    case ATTN_CODE_FLOAT << 8 | 32:
        return ATTN_DTYPE_F32;
    case ATTN_CODE_FLOAT8_E4M3FN << 8 | 8:
        return ATTN_DTYPE_FP8_E4M3;
    case ATTN_CODE_FLOAT8_E5M2 << 8 | 8:
        return ATTN_DTYPE_FP8_E5M2;
    case ATTN_CODE_FLOAT8_E4M3FNUZ << 8 | 8:
        return ATTN_DTYPE_FP8_E4M3FNUZ;
    case ATTN_CODE_INT << 8 | 8:
        return ATTN_DTYPE_INT8;
    default:
        return -1;
    }
}

static inline int32_t number_bytes(int32_t dtype_name)
{
    static const int32_t bytes[ATTN_DTYPE_INT8 + 1] = {0, 2, 2, 4, 1, 1, 1, 1};
    return bytes[dtype_name];
}

/* The dtype of K's or V's rows. */
static inline int32_t layer_kv_dtype(const struct attn_layer_desc *layer, bool is_v)
{
    return is_v && layer->kv_dtype_v != 0 ? layer->kv_dtype_v : layer->kv_dtype;
}

/* What an element of a cache is where rows are plain numbers, or -1. */
static inline int32_t number_of_kv(int32_t kv_dtype)
{
    return kv_dtype >= ATTN_KV_F16 && kv_dtype <= ATTN_KV_FP8_E4M3FNUZ ? kv_dtype : -1;
}

/* A loop for each type: a switch in the loop would keep the compiler from vectors. */
#define NUMBER_EACH(statement)                                                                     \
    for (int64_t i = 0; i < count; i++) {                                                          \
        statement;                                                                                 \
    }                                                                                              \
    break

/* `count` contiguous elements to double. */
static inline void number_load_row(double *row, const void *memory, int32_t dtype_name,
                                   int64_t count)
{
    switch (dtype_name) {
    case ATTN_DTYPE_F16:
        NUMBER_EACH(row[i] = number_from_f16(((const uint16_t *)memory)[i]));
    case ATTN_DTYPE_BF16:
        NUMBER_EACH(row[i] = number_from_bf16(((const uint16_t *)memory)[i]));
    case ATTN_DTYPE_F32:
        NUMBER_EACH(row[i] = ((const float *)memory)[i]);
    case ATTN_DTYPE_FP8_E4M3:
        NUMBER_EACH(row[i] = number_from_e4m3(((const uint8_t *)memory)[i]));
    case ATTN_DTYPE_FP8_E5M2:
        NUMBER_EACH(row[i] = number_from_e5m2(((const uint8_t *)memory)[i]));
    case ATTN_DTYPE_FP8_E4M3FNUZ:
        NUMBER_EACH(row[i] = number_from_e4m3fnuz(((const uint8_t *)memory)[i]));
    default:
        NUMBER_EACH(row[i] = ((const int8_t *)memory)[i]);
    }
}

/* The counterpart of number_load_row; fp8 saturates, int8 rounds to nearest even and saturates. */
static inline void number_store_row(void *memory, const double *row, int32_t dtype_name,
                                    int64_t count)
{
    switch (dtype_name) {
    case ATTN_DTYPE_F16:
        NUMBER_EACH(((uint16_t *)memory)[i] = number_to_f16(row[i]));
    case ATTN_DTYPE_BF16:
        NUMBER_EACH(((uint16_t *)memory)[i] = number_to_bf16(row[i]));
    case ATTN_DTYPE_F32:
        NUMBER_EACH(((float *)memory)[i] = (float)row[i]);
    case ATTN_DTYPE_FP8_E4M3:
        NUMBER_EACH(((uint8_t *)memory)[i] = number_to_e4m3(row[i]));
    case ATTN_DTYPE_FP8_E5M2:
        NUMBER_EACH(((uint8_t *)memory)[i] = number_to_e5m2(row[i]));
    case ATTN_DTYPE_FP8_E4M3FNUZ:
        NUMBER_EACH(((uint8_t *)memory)[i] = number_to_e4m3fnuz(row[i]));
    default:
        NUMBER_EACH(((int8_t *)memory)[i] = (int8_t)fmax(-128, fmin(127, nearbyint(row[i]))));
    }
}

#undef NUMBER_EACH

#endif
