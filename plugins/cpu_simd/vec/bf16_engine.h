/* SPDX-License-Identifier: Apache-2.0 */
/* The bf16 engine on AVX512_BF16: bf16 products, float32 sums. Packed operands hold pairs, as
 * vdpbf16ps and AMX want them: keys [depth / 2][TILE_KEYS][2], values [keys / 2][width][2]. */
#ifndef CPU_SIMD_BF16_ENGINE_H
#define CPU_SIMD_BF16_ENGINE_H

#include "f32_engine.h"

INLINE __m512bh bf16_bits(__m512i x)
{
    return (__m512bh)x;
}

/* sum += the products of 32 whole numbers of 16 bits, in pairs: gcc 12's intrinsic moves the sum
 * there and back each time. */
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

/* A pair of bf16 is one 32-bit element of the transposition. */
static void bf16_pack_keys(void *packed, const void *const *rows, int32_t n, int32_t columns,
                           int32_t depth)
{
    uint32_t *out = packed;
    for (int32_t j = 0; j < columns; j += 16) {
        for (int32_t d = 0; d < depth; d += 32) {
            __m512 block[16];
#pragma GCC unroll 16
            for (int32_t i = 0; i < 16; i++) {
                block[i] = j + i < n ? _mm512_loadu_ps((const uint16_t *)rows[j + i] + d)
                                     : _mm512_setzero_ps();
            }
            vf_transpose(block);
#pragma GCC unroll 16
            for (int32_t i = 0; i < 16; i++) {
                _mm512_storeu_ps(out + (int64_t)(d / 2 + i) * TILE_KEYS + j, block[i]);
            }
        }
    }
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

/* 2^x to 7.5e-5, less than the rounding of a bf16 */
INLINE __m512 exp2_short(__m512 x)
{
    __m512 limited = _mm512_max_ps(_mm512_set1_ps(-160.0f), x);
    __m512 f = _mm512_reduce_ps(limited, 0x09);
    __m512 p = _mm512_set1_ps(0.0780245227f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.226067155f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.695833541f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.999925219f));
    return _mm512_scalef_ps(p, limited);
}

/* A row that sees every key of a whole tile: its scores stay in registers. */
INLINE void bf16_softmax_whole(const struct softmax_args *args, int32_t r)
{
    enum { VECTORS = TILE_KEYS / 16 };
    const __m512 factor = _mm512_set1_ps(args->factor);
    float *s = args->scores + (int64_t)r * SCORE_STRIDE;
    uint16_t *p_row = (uint16_t *)s;
    __m512 x[VECTORS];
    __m512 most[VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) {
        most[i] = x[i] = _mm512_loadu_ps(s + 16 * i);
    }
#pragma GCC unroll 8
    for (int half = VECTORS / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) {
            most[i] = _mm512_max_ps(most[i], most[i + half]);
        }
    }
    float best = _mm512_reduce_max_ps(most[0]) * args->factor;
    __m512 minus = _mm512_set1_ps(-softmax_reference(args, r, best));
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i += 2) {
        __m512 p0 = exp2_short(_mm512_fmadd_ps(x[i], factor, minus));
        __m512 p1 = exp2_short(_mm512_fmadd_ps(x[i + 1], factor, minus));
        sum[0] = _mm512_add_ps(sum[0], p0);
        sum[1] = _mm512_add_ps(sum[1], p1);
        _mm512_storeu_si512(p_row + 16 * i, (__m512i)_mm512_cvtne2ps_pbh(p1, p0));
    }
    args->sum[r] += _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
}

/* The sum is of the probabilities before they are rounded for the values: it is the log-sum-exp. */
static void bf16_softmax(const struct softmax_args *args)
{
    int whole = args->begin == 0 && args->end == TILE_KEYS && args->value_scale == NULL;
    __m512 factor = _mm512_set1_ps(args->factor);
    for (int32_t r = 0; r < args->rows; r++) {
        float *s = args->scores + (int64_t)r * SCORE_STRIDE;
        uint16_t *p_row = (uint16_t *)s;
        int32_t low = args->low[r];
        int32_t high = args->high[r];
        if (whole && low <= 0 && high >= TILE_KEYS) {
            bf16_softmax_whole(args, r);
            continue;
        }
        float best = f32_row_max(s, args->begin, args->end, low, high) * args->factor;
        __m512 minus = _mm512_set1_ps(-softmax_reference(args, r, best));
        __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int32_t j = args->begin; j < args->end; j += 32) {
            __m512 p0 = exp2_short(_mm512_fmadd_ps(_mm512_loadu_ps(s + j), factor, minus));
            __m512 p1 = exp2_short(_mm512_fmadd_ps(_mm512_loadu_ps(s + j + 16), factor, minus));
            if (j < low || j + 32 > high) {
                p0 = vf_keep(p0, j, low, high, 0.0f);
                p1 = vf_keep(p1, j + 16, low, high, 0.0f);
            }
            sum[0] = _mm512_add_ps(sum[0], p0);
            sum[1] = _mm512_add_ps(sum[1], p1);
            if (args->value_scale != NULL) {
                p0 = _mm512_mul_ps(p0, _mm512_loadu_ps(args->value_scale + j));
                p1 = _mm512_mul_ps(p1, _mm512_loadu_ps(args->value_scale + j + 16));
                p0 = vf_keep(p0, j, low, high, 0.0f);
                p1 = vf_keep(p1, j + 16, low, high, 0.0f);
            }
            _mm512_storeu_si512(p_row + j, (__m512i)_mm512_cvtne2ps_pbh(p1, p0));
        }
        args->sum[r] += _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
    }
}

#endif
