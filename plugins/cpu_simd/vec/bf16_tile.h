/* SPDX-License-Identifier: Apache-2.0 */
/* The bf16 kernels on AVX512_BF16: bf16 products, float32 sums. Packed operands hold pairs, as
 * vdpbf16ps and AMX want them: keys [depth / 2][TILE_KEYS][2], values [keys / 2][width][2]. */
#ifndef CPU_SIMD_BF16_TILE_H
#define CPU_SIMD_BF16_TILE_H

#include "bf16_rows.h"

INLINE __m512bh bf16_bits(__m512i x)
{
    return (__m512bh)x;
}

/* sum += the products of 32 pairs of 16-bit integers, in assembly: gcc 12's intrinsic copies the
 * sum to another register and back each time. */
INLINE __m512i dot_words(__m512i sum, __m512i a, __m512i b)
{
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

INLINE __m512i pair_broadcast(const uint16_t *p)
{
    int32_t pair;
    memcpy(&pair, p, sizeof(pair));
    return _mm512_set1_epi32(pair);
}

/* Lanes whose exponent is all ones: infinite or NaN. */
INLINE __mmask32 bf16_not_finite(__m512i x)
{
    __m512i exponent = _mm512_set1_epi16(0x7f80);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
}

/* Interleaves two rows of 32: first 16 pairs and last 16 pairs, in order. */
INLINE void interleave_pairs(__m512i even, __m512i odd, __m512i *first, __m512i *last)
{
    __m512i low = _mm512_unpacklo_epi16(even, odd);
    __m512i high = _mm512_unpackhi_epi16(even, odd);
    const __m512i front = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i back = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    *first = _mm512_permutex2var_epi64(low, front, high);
    *last = _mm512_permutex2var_epi64(low, back, high);
}

static int bf16_pack_values(void *packed, const void *const *rows, int32_t n, int32_t n_padded,
                            int32_t width)
{
    uint16_t *out = packed;
    __mmask32 non_finite = 0;
    for (int32_t i = 0; i < n_padded; i += 2) {
        for (int32_t d = 0; d < width; d += 32) {
            __m512i even = _mm512_setzero_si512();
            __m512i odd = _mm512_setzero_si512();
            if (i < n) {
                even = _mm512_loadu_si512((const uint16_t *)rows[i] + d);
            }
            if (i + 1 < n) {
                odd = _mm512_loadu_si512((const uint16_t *)rows[i + 1] + d);
            }
            non_finite |= bf16_not_finite(even) | bf16_not_finite(odd);
            __m512i first;
            __m512i last;
            interleave_pairs(even, odd, &first, &last);
            _mm512_storeu_si512(out + (int64_t)i * width + 2 * d, first);
            _mm512_storeu_si512(out + (int64_t)i * width + 2 * d + 32, last);
        }
    }
    return non_finite != 0;
}

/* 2^x to 7.5e-5, less than the rounding of a bf16; 0 where the mask is */
INLINE __m512 exp2_short(__mmask16 mask, __m512 x)
{
    __m512 f = _mm512_reduce_ps(x, 0x09); /* minus its floor */
    __m512 p = _mm512_set1_ps(0.0780245227f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.226067155f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.695833541f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.999925219f));
    return _mm512_maskz_scalef_ps(mask, p, x);
}

/* Probabilities under the row's old row_max are kept if all are below this, else the row's largest
 * score is computed. 2^16 loses nothing, in bf16 or in a sum. */
#define PROBABILITY_LIMIT_BITS 0x4780

/* Softmax of a row that sees the first columns of a tile, up to the last 32 of `pairs` pairs of
 * vectors, and of these the columns in `last`. Returns 0, and has changed nothing, where the row
 * has no row_max yet or one of its probabilities passes the limit or is a NaN. */
INLINE int bf16_softmax_front(const struct softmax_args *args, int32_t r, const int pairs,
                              __mmask32 last, __m512 *sum)
{
    enum { MOST_PAIRS = TILE_KEYS / 32 };
    const __m512 factor = _mm512_set1_ps(args->softmax_scale_log2);
    const __m512 row_max = _mm512_set1_ps(args->row_max[r]);
    const float *s = args->scores + (int64_t)r * SCORE_STRIDE;
    __m512i p[MOST_PAIRS], most = _mm512_setzero_si512();
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
#pragma GCC unroll 4
    for (int i = 0; i < pairs; i++) {
        const __mmask32 seen = i + 1 < pairs ? 0xffffffffu : last;
        __m512 x0 = _mm512_fmsub_ps(_mm512_loadu_ps(s + 32 * i), factor, row_max);
        __m512 x1 = _mm512_fmsub_ps(_mm512_loadu_ps(s + 32 * i + 16), factor, row_max);
        __m512 p0 = exp2_short((__mmask16)seen, x0);
        __m512 p1 = exp2_short((__mmask16)(seen >> 16), x1);
        sums[0] = _mm512_add_ps(sums[0], p0);
        sums[1] = _mm512_add_ps(sums[1], p1);
        p[i] = (__m512i)_mm512_cvtne2ps_pbh(p1, p0);
        most = _mm512_max_epu16(most, p[i]);
    }
    if (_mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(PROBABILITY_LIMIT_BITS)) != 0) {
        return 0;
    }
    uint16_t *p_row = (uint16_t *)s;
#pragma GCC unroll 4
    for (int i = 0; i < MOST_PAIRS; i++) {
        if (i < pairs || 32 * i < args->end) {
            _mm512_storeu_si512(p_row + 32 * i, i < pairs ? p[i] : _mm512_setzero_si512());
        }
    }
    *sum = _mm512_add_ps(sums[0], sums[1]);
    return 1;
}

/* Softmax of any row; computes its largest score first. */
static __m512 bf16_softmax_row(const struct softmax_args *args, int32_t r)
{
    const __m512 factor = _mm512_set1_ps(args->softmax_scale_log2);
    float *s = args->scores + (int64_t)r * SCORE_STRIDE;
    uint16_t *p_row = (uint16_t *)s;
    const int32_t low = args->low[r], high = args->high[r];
    float best = f32_row_max(s, args->begin, args->end, low, high) * args->softmax_scale_log2;
    __m512 row_max = _mm512_set1_ps(update_row_max(args, r, best));
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int32_t j = args->begin; j < args->end; j += 32) {
        __mmask16 seen0 = 0xffff, seen1 = 0xffff;
        if (j < low || j + 32 > high) {
            seen0 = vf_inside(j, low, high);
            seen1 = vf_inside(j + 16, low, high);
        }
        __m512 x0 = _mm512_fmsub_ps(_mm512_loadu_ps(s + j), factor, row_max);
        __m512 x1 = _mm512_fmsub_ps(_mm512_loadu_ps(s + j + 16), factor, row_max);
        __m512 p0 = exp2_short(seen0, x0);
        __m512 p1 = exp2_short(seen1, x1);
        sum[0] = _mm512_add_ps(sum[0], p0);
        sum[1] = _mm512_add_ps(sum[1], p1);
        if (args->value_scale != NULL) {
            p0 = _mm512_maskz_mul_ps(seen0, p0, _mm512_loadu_ps(args->value_scale + j));
            p1 = _mm512_maskz_mul_ps(seen1, p1, _mm512_loadu_ps(args->value_scale + j + 16));
        }
        _mm512_storeu_si512(p_row + j, (__m512i)_mm512_cvtne2ps_pbh(p1, p0));
    }
    return _mm512_add_ps(sum[0], sum[1]);
}

/* Softmax under the old row_max for a row that sees keys from the tile's first on; returns 0 where
 * that is not possible. */
INLINE int bf16_softmax_known(const struct softmax_args *args, int32_t r, __m512 *sum)
{
    const int32_t high = args->high[r] < args->end ? args->high[r] : args->end;
    if (args->low[r] > 0 || high <= 0 || args->begin > 0 || args->value_scale != NULL) {
        return 0;
    }
    const __mmask32 last = 0xffffffffu >> (-high & 31);
    args->scores_scale[r] = 1.0f;
    switch ((high + 31) / 32) {
    case 1:
        return bf16_softmax_front(args, r, 1, last, sum);
    case 2:
        return bf16_softmax_front(args, r, 2, last, sum);
    case 3:
        return bf16_softmax_front(args, r, 3, last, sum);
    default:
        return bf16_softmax_front(args, r, 4, last, sum);
    }
}

/* The sum is of the probabilities before they are rounded for the values: it is the log-sum-exp. */
static void bf16_softmax(const struct softmax_args *args)
{
    __m512 sum[ROW_BLOCK_MAX + 3];
    for (int32_t r = 0; r < args->rows; r++) {
        if (!bf16_softmax_known(args, r, &sum[r])) {
            sum[r] = bf16_softmax_row(args, r);
        }
    }
    sum[args->rows] = sum[args->rows + 1] = sum[args->rows + 2] = _mm512_setzero_ps();
    for (int32_t r = 0; r < args->rows; r += 4) {
        float of_row[4];
        vf_sum_four(of_row, sum[r], sum[r + 1], sum[r + 2], sum[r + 3]);
        for (int32_t i = 0; i < 4 && r + i < args->rows; i++) {
            args->row_sum[r + i] += of_row[i];
        }
    }
}

#endif
