/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of 4 floats: Advanced SIMD, which every AArch64 has. */
#ifndef CPU_SIMD_VEC_NEON_H
#define CPU_SIMD_VEC_NEON_H

#include <arm_neon.h>

#include "cpu_simd/convert.h"

/* 24 sums, 4 columns and one broadcast of 32 registers. */
#define VF_WIDTH 4
#define VF_COLUMNS 4
#define VF_ROWS 6

typedef float32x4_t vf;

#define vf_load vld1q_f32
#define vf_store vst1q_f32
#define vf_set1 vdupq_n_f32
#define vf_fma(a, b, c) vfmaq_f32(c, a, b)
#define vf_abs vabsq_f32
#define vf_sqrt vsqrtq_f32
#define vf_sum vaddvq_f32
#define vf_greatest vmaxvq_f32

/* b where either is NaN: fmax and fmin would keep the NaN, or drop it */
static inline vf vf_max(vf a, vf b)
{
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}
static inline vf vf_min(vf a, vf b)
{
    return vbslq_f32(vcltq_f32(a, b), a, b);
}
static inline void vf_sum_four(float *out, vf a, vf b, vf c, vf d)
{
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}
/* first, first + 1, … */
static inline vf vf_ramp(float first)
{
    static const float lanes[4] = {0, 1, 2, 3};
    return vaddq_f32(vdupq_n_f32(first), vld1q_f32(lanes));
}
static inline vf vf_keep(vf x, int32_t first, int32_t low, int32_t high, float other)
{
    static const int32_t lanes[4] = {0, 1, 2, 3};
    int32x4_t lane = vaddq_s32(vdupq_n_s32(first), vld1q_s32(lanes));
    uint32x4_t inside =
        vandq_u32(vcgeq_s32(lane, vdupq_n_s32(low)), vcltq_s32(lane, vdupq_n_s32(high)));
    return vbslq_f32(inside, x, vdupq_n_f32(other));
}
/* x less its floor; vf_times_power takes *whole: 0 for what is below 2^-126 */
static inline vf vf_fraction(vf x, vf *whole)
{
    vf limited = vf_min(vdupq_n_f32(127.0f), vf_max(vdupq_n_f32(-127.0f), x));
    *whole = vrndmq_f32(limited);
    return vsubq_f32(limited, *whole);
}
static inline vf vf_times_power(vf p, vf whole)
{
    int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(whole), vdupq_n_s32(127));
    return vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
static inline vf vf_load_f16(const uint16_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
/* Four bytes as 16-bit lanes. */
static inline uint16x4_t bytes_of_four(const void *p)
{
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vget_low_u16(vmovl_u8(vcreate_u8(four)));
}
/* e4m3 in f16's fields is the value / 256; its NaN becomes f16's */
static inline vf vf_load_e4m3(const uint8_t *p)
{
    uint16x4_t x = bytes_of_four(p);
    uint16x4_t magnitude = vand_u16(x, vdup_n_u16(0x7f));
    uint16x4_t nan = vceq_u16(magnitude, vdup_n_u16(0x7f));
    uint16x4_t sign = vshl_n_u16(vand_u16(x, vdup_n_u16(0x80)), 8);
    uint16x4_t half = vorr_u16(vshl_n_u16(magnitude, 7), sign);
    half = vorr_u16(half, vand_u16(nan, vdup_n_u16(0x7e00)));
    return vmulq_f32(vcvt_f32_f16(vreinterpret_f16_u16(half)), vdupq_n_f32(256.0f));
}
static inline vf vf_load_e5m2(const uint8_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vshl_n_u16(bytes_of_four(p), 8)));
}
static inline vf vf_load_int8(const int8_t *p)
{
    int8x8_t bytes = vreinterpret_s8_u16(bytes_of_four(p)); /* value, 0, value, 0, … */
    int16x4_t wide = vshr_n_s16(vshl_n_s16(vreinterpret_s16_s8(bytes), 8), 8);
    return vcvtq_f32_s32(vmovl_s16(wide));
}
/* Round to nearest even; a NaN stays a quiet NaN. */
static inline void vf_store_bf16(uint16_t *p, vf x)
{
    uint32x4_t bits = vreinterpretq_u32_f32(x);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16));
}
static inline void vf_store_f16(uint16_t *p, vf x)
{
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
static inline void vf_transpose(vf *r)
{
    float32x4_t a = vtrn1q_f32(r[0], r[1]), b = vtrn2q_f32(r[0], r[1]);
    float32x4_t c = vtrn1q_f32(r[2], r[3]), d = vtrn2q_f32(r[2], r[3]);
    r[0] = vcombine_f32(vget_low_f32(a), vget_low_f32(c));
    r[1] = vcombine_f32(vget_low_f32(b), vget_low_f32(d));
    r[2] = vcombine_f32(vget_high_f32(a), vget_high_f32(c));
    r[3] = vcombine_f32(vget_high_f32(b), vget_high_f32(d));
}

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define vf_dot_pairs(a, b, c) vbfdotq_f32(c, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b))
#define vf_store_pairs(p, low, high)                                                               \
    vst1q_u16(p, vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high)))
/* Pairs of two rows' elements. */
static inline void load_zipped(vf *out, const uint16_t *even, const uint16_t *odd, int vectors)
{
    for (int c = 0; c < vectors; c += 2) {
        uint16x8_t x = vld1q_u16(even + 4 * c), y = vld1q_u16(odd + 4 * c);
        out[c] = vreinterpretq_f32_u16(vzip1q_u16(x, y));
        out[c + 1] = vreinterpretq_f32_u16(vzip2q_u16(x, y));
    }
}
#define vf_load_pairs load_zipped
#endif

#include "vec_common.h"

#endif
