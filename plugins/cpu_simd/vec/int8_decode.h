/* SPDX-License-Identifier: Apache-2.0 */
/* Decode from int8 caches on AVX512_VNNI. Scores are sums of integers: q is converted once to
 * 16-bit integers, the largest 32767, with a scale for the row; the last bit is 2^-8 of a bf16's at
 * that size. A key at D 128 and 4 heads takes 4 loads that widen and 16 dot instructions, where
 * bf16 needs 28 more to convert codes. Exact up to 512 dims: 512 * 128 * 32767 < 2^31.
 *
 * Probabilities differ too much in size for 16-bit integers: values are computed as fp8's are. */
#ifndef CPU_SIMD_INT8_DECODE_H
#define CPU_SIMD_INT8_DECODE_H

#include "codes_decode.h"

#define QUERY_LARGEST 32767.0f

static void int8_decode_scores(float *scores, const void *q, const struct decode_args *args)
{
    codes_scores(scores, q, args, args->depth, CODES_INT8);
}

/* A row of q has room for two parts, of which int4_order leaves one. */
static void int4_decode_scores(float *scores, const void *q, const struct decode_args *args)
{
    codes_scores(scores, q, args, args->depth / 2, CODES_INT4);
}

static void int8_decode_values(float *acc, const void *p, const struct decode_args *args)
{
    codes_values(acc, p, args, CODES_INT8);
}

static void int4_decode_values(float *acc, const void *p, const struct decode_args *args)
{
    codes_values(acc, p, args, CODES_INT4);
}

/* Elements d .. d+15 of a row of bf16, its second part added. */
INLINE __m512 query_load(const uint16_t *row, int32_t d, int32_t second)
{
    __m512 x = vf_load_bf16(row + d);
    return second > 0 ? _mm512_add_ps(x, vf_load_bf16(row + second + d)) : x;
}

/* The scale of n whole numbers up to `most`, NaN where an element is not finite, and what makes
 * them of elements. */
INLINE float query_scale(const uint16_t *row, int32_t n, int32_t second, float most, __m512 *factor)
{
    __m512 largest = _mm512_setzero_ps(), non_finite = _mm512_setzero_ps();
    for (int32_t d = 0; d < n; d += 16) {
        __m512 x = query_load(row, d, second);
        largest = _mm512_max_ps(largest, _mm512_abs_ps(x));
        non_finite = _mm512_fmadd_ps(x, _mm512_setzero_ps(), non_finite);
    }
    float top = vf_greatest(largest);
    *factor = _mm512_set1_ps(top > 0.0f ? most / top : 0.0f);
    return top / most + vf_sum(non_finite);
}

INLINE void query_store(uint16_t *out, __m512 x, __m512 factor)
{
    __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, factor));
    _mm256_storeu_si256((__m256i *)(void *)out, _mm512_cvtsepi32_epi16(whole));
}

INLINE float int8_order_to(void *q, int32_t n, float most)
{
    uint16_t *row = q;
    __m512 factor;
    float scale = query_scale(row, n, 0, most, &factor);
    for (int32_t d = 0; d < n; d += 16) {
        query_store(row + d, query_load(row, d, 0), factor);
    }
    return scale;
}

static float int8_order(void *q, int32_t n)
{
    return int8_order_to(q, n, QUERY_LARGEST);
}

/* Moves the even dims of each 64 before the odd ones. */
static float int4_order(void *q, int32_t n)
{
    const __m512i evens =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    uint16_t *row = q;
    __m512 factor;
    float scale = query_scale(row, n / 2, n / 2, QUERY_LARGEST, &factor);
    for (int32_t d = 0; d < n / 2; d += 64) {
        __m512 x[4];
        for (int32_t i = 0; i < 4; i++) {
            x[i] = query_load(row, d + 16 * i, n / 2);
        }
        for (int32_t i = 0; i < 2; i++) {
            query_store(row + d + 16 * i, _mm512_permutex2var_ps(x[2 * i], evens, x[2 * i + 1]),
                        factor);
            query_store(row + d + 32 + 16 * i, _mm512_permutex2var_ps(x[2 * i], odds, x[2 * i + 1]),
                        factor);
        }
    }
    return scale;
}

static const struct decode_kernels int8_decode = {
    .scores = int8_decode_scores,
    .values = int8_decode_values,
    .finish = codes_finish,
    .order = int8_order,
};

static const struct decode_kernels int4_decode = {
    .scores = int4_decode_scores,
    .values = int4_decode_values,
    .finish = codes_finish,
    .order = int4_order,
};

#endif
