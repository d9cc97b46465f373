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

#define vf_load(p) (*(p))
#define vf_store(p, x) (*(p) = (x))
#define vf_set1(x) (x)
#define vf_fma(a, b, c) ((a) * (b) + (c))
#define vf_abs fabsf
#define vf_sqrt sqrtf
#define vf_sum(x) (x)
#define vf_greatest(x) (x)
#define vf_ramp(first) (first)
#define vf_load_bf16(p) number_from_bf16(*(p))
#define vf_load_f16(p) number_from_f16(*(p))
#define vf_load_e4m3(p) number_from_e4m3(*(p))
#define vf_load_e5m2(p) number_from_e5m2(*(p))
#define vf_load_int8(p) ((float)*(p))
#define vf_store_bf16(p, x) (*(p) = f32_to_bf16(x))
#define vf_store_f16(p, x) (*(p) = f32_to_f16(x))
#define vf_transpose(rows) ((void)(rows))

static inline vf vf_max(vf a, vf b)
{
    return a > b ? a : b;
}
static inline vf vf_min(vf a, vf b)
{
    return a < b ? a : b;
}
static inline void vf_sum_four(float *out, vf a, vf b, vf c, vf d)
{
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
}
static inline vf vf_keep(vf x, int32_t first, int32_t low, int32_t high, float other)
{
    return first >= low && first < high ? x : other;
}
/* x less its floor; vf_times_power takes *whole */
static inline vf vf_fraction(vf x, vf *whole)
{
    float limited = x < -160.0f ? -160.0f : x > 200.0f ? 200.0f : x;
    *whole = floorf(limited);
    return limited - *whole;
}
static inline vf vf_times_power(vf p, vf whole)
{
    return ldexpf(p, whole == whole ? (int)whole : 0);
}

#include "vec_common.h"

#endif
