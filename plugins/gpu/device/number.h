/* SPDX-License-Identifier: Apache-2.0 */
/* Conversion of elements of any type to and from float32, rounded to nearest. fp8 saturates. */
#ifndef GPU_DEVICE_NUMBER_H
#define GPU_DEVICE_NUMBER_H

#include <attn/tensor.h>

#include "gpu/device/target.h"

#define FP8_LARGEST 448.0f
#define INT8_LARGEST 127.0f
#define LEAST_ROW_SCALE 1e-6f

/* A NaN keeps its sign, which the conversion would drop. */
GPU_INLINE float float_of_half(uint16_t bits)
{
    float x = float_of_half_bits(bits);
    return isnan(x) ? bits_float(0x7fc00000u | (uint32_t)(bits & 0x8000) << 16) : x;
}

GPU_INLINE float number_load(const char *row, int32_t dtype, int32_t d)
{
    switch (dtype) {
    case ATTN_DTYPE_F16:
        return float_of_half(((const uint16_t *)row)[d]);
    case ATTN_DTYPE_BF16:
        return float_of_bf16(((const uint16_t *)row)[d]);
    case ATTN_DTYPE_FP8_E4M3:
    case ATTN_DTYPE_FP8_E5M2:
        return float_of_fp8(dtype == ATTN_DTYPE_FP8_E5M2, ((const uint8_t *)row)[d]);
    case ATTN_DTYPE_INT8:
        return (float)((const int8_t *)row)[d];
    default:
        return ((const float *)row)[d];
    }
}

/* An element that is loaded: a float, or 16 bits of this dtype. */
GPU_INLINE float number_of(float x, int32_t dtype)
{
    (void)dtype;
    return x;
}

GPU_INLINE float number_of(uint16_t x, int32_t dtype)
{
    return dtype == ATTN_DTYPE_F16 ? float_of_half(x) : float_of_bf16(x);
}

GPU_INLINE uint8_t number_to_fp8(int32_t dtype, float x)
{
    bool e5m2 = dtype == ATTN_DTYPE_FP8_E5M2;
    if (isnan(x)) { /* NaN keeps its sign, as other numbers do */
        return (float_bits(x) >> 24 & 0x80) | (e5m2 ? 0x7e : 0x7f);
    }
    return fp8_of(e5m2, x);
}

GPU_INLINE int32_t number_bytes_of(int32_t dtype)
{
    return dtype == ATTN_DTYPE_F32 ? 4 : dtype <= ATTN_DTYPE_BF16 ? 2 : 1;
}

GPU_INLINE void number_store(char *row, int32_t dtype, int32_t d, float x)
{
    switch (dtype) {
    case ATTN_DTYPE_F16:
        ((uint16_t *)row)[d] = half_of(x);
        break;
    case ATTN_DTYPE_BF16:
        ((uint16_t *)row)[d] = bf16_of(x);
        break;
    case ATTN_DTYPE_FP8_E4M3:
    case ATTN_DTYPE_FP8_E5M2:
        ((uint8_t *)row)[d] = number_to_fp8(dtype, x);
        break;
    case ATTN_DTYPE_INT8:
        ((int8_t *)row)[d] = (int8_t)fmaxf(-128.0f, fminf(127.0f, rintf(x)));
        break;
    default:
        ((float *)row)[d] = x;
        break;
    }
}

/* A divisor with precomputed values for its quotients. */
struct number_divisor {
    float scale, inverse;
    bool plain; /* the inverse is a normal number */
    bool exact; /* the scale is a power of two */
};

GPU_INLINE number_divisor divisor_of(float scale)
{
    float inverse = reciprocal_nearest(scale), size = fabsf(inverse);
    bool plain = size > 1e-30f && size < 1e30f;
    return {scale, inverse, plain, plain && (float_bits(scale) & 0x7fffff) == 0};
}

/* x / scale rounded to odd, so that a further rounding to any smaller format rounds as the exact
 * quotient would. The product with the inverse is corrected as by Markstein; an even result that is
 * not exact moves one unit towards the exact quotient, so that it is on no boundary of a format. */
GPU_INLINE float divide_odd(float x, number_divisor by)
{
    float q = x * by.inverse;
    if (isnan(x) || q == 0.0f) { /* keep their signs */
        return isnan(x) ? x : q;
    }
    if (!(fabsf(q) < 60000.0f) || !by.plain) { /* saturates, is not finite, or has no inverse */
        return divide_nearest(x, by.scale);
    }
    q = fmaf(fmaf(-q, by.scale, x), by.inverse, q);
    float rest = fmaf(-q, by.scale, x);
    int32_t bits = (int32_t)float_bits(q);
    if (rest == 0.0f || (bits & 1) != 0) {
        return q;
    }
    bool farther = (rest < 0.0f) == ((q < 0.0f) != (by.scale < 0.0f));
    return bits_float((uint32_t)farther ? bits + 1 : bits - 1);
}

/* A double to float, rounded to odd, so that only the next rounding counts. */
GPU_INLINE float odd_float(double x)
{
    float y = float_toward_zero(x);
    return (double)y != x && isfinite(y) ? bits_float((uint32_t)(int32_t)float_bits(y) | 1) : y;
}

/* 2^(code - 127), or of 255 NaN. */
GPU_INLINE float e8m0_number(uint32_t code)
{
    return code == 255 ? NAN : bits_float(code > 0 ? code << 23 : 1u << 22);
}

/* e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6; rounds half to even codes. */
template <class T> GPU_INLINE uint32_t e2m1_of(T x)
{
    const T middle[7] = {T(0.25), T(0.75), T(1.25), T(1.75), T(2.5), T(3.5), T(5)};
    const T size = x < T(0) ? -x : x;
    uint32_t code = 0;
#pragma unroll
    for (uint32_t i = 0; i < 7; i++) {
        code += size > middle[i] || (size == middle[i] && (i & 1) != 0);
    }
    return code | (signbit(x) ? 8u : 0u);
}

/* To int8, rounded half away from zero; NaN becomes 0. */
GPU_INLINE int8_t number_to_int8(float x)
{
    return isnan(x) ? (int8_t)0 : (int8_t)fmaxf(-INT8_LARGEST, fminf(INT8_LARGEST, roundf(x)));
}

GPU_INLINE float warp_sum(float x)
{
    for (int d = GPU_LANES / 2; d > 0; d >>= 1) {
        x += lane_xor(x, d);
    }
    return x;
}

/* The larger of two magnitudes; a NaN is kept if `keep_nan`. */
GPU_INLINE float warp_largest(float x, bool keep_nan)
{
    for (int d = GPU_LANES / 2; d > 0; d >>= 1) {
        float y = lane_xor(x, d);
        x = keep_nan && (isnan(x) || isnan(y)) ? NAN : fmaxf(x, y);
    }
    return x;
}

#endif
