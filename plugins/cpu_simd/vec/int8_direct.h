/* SPDX-License-Identifier: Apache-2.0 */
/* Decode from int8 caches on AVX512_VNNI. Scores are sums of whole numbers: q becomes 16-bit ones
 * once, of which the largest is 32767, with a scale for the row; the last bit is 2^-8 of a bf16's
 * at that size. Per key, D 128 and 4 heads, 4 loads that widen and 16 dot instructions, where bf16
 * wants 28 more to convert codes. Exact up to 512 dims: 512 * 128 * 32767 < 2^31.
 *
 * Probabilities are too unlike each other for 16 bits: values go as fp8's do. */
#ifndef CPU_SIMD_INT8_DIRECT_H
#define CPU_SIMD_INT8_DIRECT_H

#include "codes_direct.h"

#define QUERY_LARGEST 32767.0f

/* As fold_four and fold_lanes. */
INLINE __m512i fold_four_int(__m512i a, __m512i b, __m512i c, __m512i d)
{
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

INLINE __m512i fold_lanes_int(const __m512i *v)
{
    __m512i a = _mm512_add_epi32(_mm512_shuffle_i32x4(v[0], v[1], 0x88),
                                 _mm512_shuffle_i32x4(v[0], v[1], 0xdd));
    __m512i b = _mm512_add_epi32(_mm512_shuffle_i32x4(v[2], v[3], 0x88),
                                 _mm512_shuffle_i32x4(v[2], v[3], 0xdd));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

INLINE void int8_scores_rows(float *scores, const int16_t *q, const float *q_scale,
                             const struct direct_args *args, const int fixed_chunks,
                             struct burst *burst)
{
    const int chunks = fixed_chunks > 0 ? fixed_chunks : args->depth / 32;
    const __m512i by_head = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512 scale =
        _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                              _mm512_castps128_ps512(_mm_loadu_ps(q_scale)));
    for (int32_t j = 0; j < args->keys; j += 4) {
        __m512i folded[4];
#pragma GCC unroll 4
        for (int32_t i = 0; i < 4; i++) {
            const char *key = (const char *)key_row(args, j + i);
            __m512i sum[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(),
                              _mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 8
            for (int c = 0; c < chunks; c++) {
                __m512i x = _mm512_cvtepi8_epi16(
                    _mm256_loadu_si256((const __m256i *)(const void *)(key + 32 * c)));
#pragma GCC unroll 4
                for (int r = 0; r < 4; r++) {
                    __m512i left = _mm512_loadu_si512(q + r * args->depth + 32 * c);
                    sum[r] = _mm512_dpwssd_epi32(sum[r], x, left);
                }
            }
            prefetch_burst(burst);
            folded[i] = fold_four_int(sum[0], sum[1], sum[2], sum[3]);
        }
        __m512i whole = _mm512_permutexvar_epi32(by_head, fold_lanes_int(folded));
        __m512 all = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), scale);
        _mm_storeu_ps(scores + j, _mm512_castps512_ps128(all));
        _mm_storeu_ps(scores + SCORE_STRIDE + j, _mm512_extractf32x4_ps(all, 1));
        _mm_storeu_ps(scores + 2 * SCORE_STRIDE + j, _mm512_extractf32x4_ps(all, 2));
        _mm_storeu_ps(scores + 3 * SCORE_STRIDE + j, _mm512_extractf32x4_ps(all, 3));
    }
}

static void int8_direct_scores(float *scores, const void *q, const struct direct_args *args)
{
    struct burst burst = burst_begin(args, (args->keys + 3) / 4 * args->rows);
    for (int32_t r = 0; r < args->rows; r += 4) {
        float *s = scores + (int64_t)r * SCORE_STRIDE;
        const int16_t *left = (const int16_t *)q + (int64_t)r * args->depth;
        if (args->depth == 128) {
            int8_scores_rows(s, left, args->q_scale + r, args, 4, &burst);
        } else {
            int8_scores_rows(s, left, args->q_scale + r, args, 0, &burst);
        }
    }
}

static void int8_direct_values(float *acc, const void *p, const struct direct_args *args)
{
    codes_values(acc, p, args, 1);
}

/* bf16 to 16-bit whole numbers in place; their scale, NaN where an element is not finite. */
static float int8_order(void *q, int32_t n)
{
    uint16_t *row = q;
    __m512 largest = _mm512_setzero_ps(), spoilt = _mm512_setzero_ps();
    for (int32_t d = 0; d < n; d += 16) {
        __m512 x = vf_load_bf16(row + d);
        largest = _mm512_max_ps(largest, _mm512_abs_ps(x));
        spoilt = _mm512_fmadd_ps(x, _mm512_setzero_ps(), spoilt);
    }
    float top = vf_greatest(largest);
    __m512 factor = _mm512_set1_ps(top > 0.0f ? QUERY_LARGEST / top : 0.0f);
    for (int32_t d = 0; d < n; d += 16) {
        __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(vf_load_bf16(row + d), factor));
        _mm256_storeu_si256((__m256i *)(void *)(row + d), _mm512_cvtsepi32_epi16(whole));
    }
    return top / QUERY_LARGEST + vf_sum(spoilt);
}

static const struct direct_engine int8_direct = {
    .scores = int8_direct_scores,
    .values = int8_direct_values,
    .finish = codes_finish,
    .order = int8_order,
};

#endif
