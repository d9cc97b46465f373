/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of one float: the baseline. */
#ifndef CPU_SIMD_VEC_SCALAR_H
#define CPU_SIMD_VEC_SCALAR_H

#include <math.h>

#include "cpu_simd/convert.h"

#define VF_WIDTH 1
#define VF_COLUMNS 4 /* vectors of a gemm block */
#define VF_ROWS 4

typedef float vf;

static inline vf vf_load(const float *p)
{
    return *p;
}
static inline void vf_store(float *p, vf x)
{
    *p = x;
}
static inline vf vf_set1(float x)
{
    return x;
}
static inline vf vf_add(vf a, vf b)
{
    return a + b;
}
static inline vf vf_sub(vf a, vf b)
{
    return a - b;
}
static inline vf vf_mul(vf a, vf b)
{
    return a * b;
}
static inline vf vf_div(vf a, vf b)
{
    return a / b;
}
static inline vf vf_quotient(vf x, vf y)
{
    return vf_div(x, y);
}
static inline vf vf_fma(vf a, vf b, vf c)
{
    return a * b + c;
}
/* b where either is NaN */
static inline vf vf_max(vf a, vf b)
{
    return a > b ? a : b;
}
static inline vf vf_min(vf a, vf b)
{
    return a < b ? a : b;
}
static inline vf vf_abs(vf x)
{
    return fabsf(x);
}
static inline vf vf_sqrt(vf x)
{
    return sqrtf(x);
}
static inline float vf_sum(vf x)
{
    return x;
}
static inline void vf_sum_four(float *out, vf a, vf b, vf c, vf d)
{
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
}
static inline float vf_greatest(vf x)
{
    return x;
}
static inline vf vf_ramp(float first)
{
    return first;
}
static inline vf vf_keep(vf x, int32_t first, int32_t low, int32_t high, float other)
{
    return first >= low && first < high ? x : other;
}
/* 2^x: p(x - floor(x)) * 2^floor(x), polynomial of degree 6 */
static inline vf vf_exp2(vf x)
{
    float limited = x < -160.0f ? -160.0f : x;
    float whole = floorf(limited);
    float f = limited - whole;
    float p = 0.000217022555f;
    p = p * f + 0.00124396878f;
    p = p * f + 0.009678841f;
    p = p * f + 0.055483342f;
    p = p * f + 0.240229836f;
    p = p * f + 0.693146984f;
    p = p * f + 1.0f;
    return ldexpf(p, whole == whole ? (int)(whole > 200.0f ? 200.0f : whole) : 0);
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    return bf16_to_f32(*p);
}
static inline vf vf_load_f16(const uint16_t *p)
{
    return f16_to_f32(*p);
}
static inline vf vf_load_e4m3(const uint8_t *p)
{
    return e4m3_to_f32(*p);
}
static inline vf vf_load_e5m2(const uint8_t *p)
{
    return e5m2_to_f32(*p);
}
static inline vf vf_load_int8(const int8_t *p)
{
    return *p;
}
static inline void vf_store_bf16(uint16_t *p, vf x)
{
    *p = f32_to_bf16(x);
}
static inline void vf_store_f16(uint16_t *p, vf x)
{
    *p = f32_to_f16(x);
}
static inline void vf_transpose(vf *rows)
{
}

#endif
