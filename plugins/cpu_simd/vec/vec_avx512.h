/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of 16 floats: AVX-512 F, BW, DQ, VL. */
#ifndef CPU_SIMD_VEC_AVX512_H
#define CPU_SIMD_VEC_AVX512_H

#include <immintrin.h>

#include "cpu_simd/convert.h"

#define VF_WIDTH 16
#define VF_COLUMNS 4
#define VF_ROWS 6

typedef __m512 vf;

#define vf_load _mm512_loadu_ps
#define vf_store _mm512_storeu_ps
#define vf_set1 _mm512_set1_ps
#define vf_fma _mm512_fmadd_ps
/* max and min: b where either is NaN */
#define vf_max _mm512_max_ps
#define vf_min _mm512_min_ps
#define vf_abs _mm512_abs_ps
#define vf_sqrt _mm512_sqrt_ps
#define vf_sum _mm512_reduce_add_ps
#define vf_greatest _mm512_reduce_max_ps
#define vf_times_power _mm512_scalef_ps

/* By a step of Newton's, to which infinity is 2^126. AMD's division takes less than that, Intel's
 * (AMX) more. */
static inline vf quotient_near(vf x, vf y)
{
    y = _mm512_min_ps(_mm512_set1_ps(0x1p126f), y);
    vf near = _mm512_rcp14_ps(y);
    near = _mm512_fmadd_ps(near, _mm512_fnmadd_ps(y, near, _mm512_set1_ps(1.0f)), near);
    return _mm512_mul_ps(x, near);
}
#if !defined(__AVX512BF16__) || defined(__AMX_TILE__)
#define vf_quotient quotient_near
#endif
static inline void vf_sum_four(float *out, vf a, vf b, vf c, vf d)
{
    vf ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    vf cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    vf lanes = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
static inline __m512i vf_lanes(void)
{
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
static inline vf vf_ramp(float first)
{
    return _mm512_add_ps(_mm512_set1_ps(first), _mm512_cvtepi32_ps(vf_lanes()));
}
/* lanes of a vector that begins at column `first` and lie in low .. high-1 */
static inline __mmask16 vf_inside(int32_t first, int32_t low, int32_t high)
{
    int32_t from = low - first < 0 ? 0 : low - first > 16 ? 16 : low - first;
    int32_t to = high - first < 0 ? 0 : high - first > 16 ? 16 : high - first;
    return (__mmask16)(((1u << to) - 1u) & ~((1u << from) - 1u));
}
static inline vf vf_keep(vf x, int32_t first, int32_t low, int32_t high, float other)
{
    return _mm512_mask_mov_ps(_mm512_set1_ps(other), vf_inside(first, low, high), x);
}
/* x less its floor, 0 of an infinite x; vf_times_power takes *whole, of which scalef takes the
 * floor */
static inline vf vf_fraction(vf x, vf *whole)
{
    *whole = x;
    return _mm512_reduce_ps(x, 0x09);
}
static inline vf vf_load_bf16(const uint16_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline vf vf_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
/* e4m3 in f16's fields is the value / 256; its NaN becomes f16's */
static inline vf vf_load_e4m3(const uint8_t *p)
{
    __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
    __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
    __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign);
    half = _mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}
static inline vf vf_load_e5m2(const uint8_t *p)
{
    __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    return _mm512_cvtph_ps(_mm256_slli_epi16(x, 8));
}
static inline vf vf_load_int8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline void vf_store_bf16(uint16_t *p, vf x)
{
#ifdef __AVX512BF16__ /* results below the normal numbers become 0 */
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}
static inline void vf_store_f16(uint16_t *p, vf x)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
/* 16 x 16 of 32-bit elements */
static inline void vf_transpose(vf *r)
{
    vf t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

#ifdef __AVX512BF16__
#define vf_dot_pairs(a, b, c) _mm512_dpbf16_ps(c, (__m512bh)(a), (__m512bh)(b))
#define vf_store_pairs(p, low, high) _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(high, low))
#endif

#include "vec_common.h"

#endif
