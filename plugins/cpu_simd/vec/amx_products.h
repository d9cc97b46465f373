/* SPDX-License-Identifier: Apache-2.0 */
/* Products of floats by tiles: an operand is two bf16, what the first rounds off is the second, and
 * of their four products the three larger are summed. What is lost is 2^-16 of a product. Left
 * operands are [m][2][k], right ones twice [k / 2][n][2].
 *
 * 32 x 32 of the result and 32 of k: 12 tdpbf16ps (192 cycles) on 10 tile loads (80). */
#ifndef CPU_SIMD_AMX_PRODUCTS_H
#define CPU_SIMD_AMX_PRODUCTS_H

#include "amx_chain.h"

/* 32 floats as bf16 and what is left of them */
INLINE void amx_split(__m512 x, __m512 y, __m512i *high, __m512i *low)
{
    *high = (__m512i)_mm512_cvtne2ps_pbh(y, x);
    __m512i front = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(*high));
    __m512i back = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(*high, 1));
    x = _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32(front, 16)));
    y = _mm512_sub_ps(y, _mm512_castsi512_ps(_mm512_slli_epi32(back, 16)));
    *low = (__m512i)_mm512_cvtne2ps_pbh(y, x);
}

static void amx_left(struct product_operand *operand, const float *rows, int64_t stride, int32_t m,
                     int32_t k)
{
    uint16_t *out = operand->memory;
    operand->data = out;
    operand->stride = 2 * (int64_t)k;
    for (int32_t i = 0; i < m; i++, rows += stride, out += operand->stride) {
        for (int32_t p = 0; p < k; p += 32) {
            __m512i high, low;
            amx_split(_mm512_loadu_ps(rows + p), _mm512_loadu_ps(rows + p + 16), &high, &low);
            _mm512_storeu_si512(out + p, high);
            _mm512_storeu_si512(out + k + p, low);
        }
    }
}

static void amx_right(struct product_operand *operand, const float *rows, int64_t stride, int32_t k,
                      int32_t n)
{
    uint16_t *out = operand->memory;
    operand->data = out;
    operand->stride = n;
    operand->k = k;
    for (int32_t p = 0; p < k; p += 2) {
        for (int32_t j = 0; j < n; j += 32) {
            const float *even = rows + p * stride + j, *odd = even + stride;
            __m512i high[2], low[2], first, last;
            amx_split(_mm512_loadu_ps(even), _mm512_loadu_ps(even + 16), &high[0], &low[0]);
            amx_split(_mm512_loadu_ps(odd), _mm512_loadu_ps(odd + 16), &high[1], &low[1]);
            interleave_pairs(high[0], high[1], &first, &last);
            _mm512_storeu_si512(out + (int64_t)p * n + 2 * j, first);
            _mm512_storeu_si512(out + (int64_t)p * n + 2 * j + 32, last);
            interleave_pairs(low[0], low[1], &first, &last);
            _mm512_storeu_si512(out + (int64_t)(k + p) * n + 2 * j, first);
            _mm512_storeu_si512(out + (int64_t)(k + p) * n + 2 * j + 32, last);
        }
    }
}

#define AMX_FOUR                                                                                   \
    _tile_dpbf16ps(0, 4, 6);                                                                       \
    _tile_dpbf16ps(1, 4, 7);                                                                       \
    _tile_dpbf16ps(2, 5, 6);                                                                       \
    _tile_dpbf16ps(3, 5, 7);

/* 32 x 32 sums from (i, j) on */
INLINE void amx_product(float *sums, const struct product_args *args, int32_t i, int32_t j)
{
    const int64_t lda = args->left->stride, ldb = args->right->stride;
    const uint16_t *a = (const uint16_t *)args->left->data + i * lda;
    const uint16_t *b = (const uint16_t *)args->right->data + 2 * j;
    const int64_t other = args->left->stride / 2, lower = args->right->k; /* halves */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int32_t p = 0; p < args->k; p += 32) {
        const uint16_t *high = b + p * ldb, *low = b + (p + lower) * ldb;
        _tile_loadd(4, a + p, lda * 2);
        _tile_loadd(5, a + 16 * lda + p, lda * 2);
        _tile_loadd(6, low, ldb * 4);
        _tile_loadd(7, low + 32, ldb * 4);
        AMX_FOUR
        _tile_loadd(6, high, ldb * 4);
        _tile_loadd(7, high + 32, ldb * 4);
        AMX_FOUR
        _tile_loadd(4, a + other + p, lda * 2);
        _tile_loadd(5, a + other + 16 * lda + p, lda * 2);
        AMX_FOUR
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
}
#undef AMX_FOUR

static void amx_multiply(const struct product_args *args)
{
    _Alignas(64) float sums[32 * 32];
    tiles_and_memory();
    const int32_t end = args->first + args->m;
    for (int32_t i = args->first; i < end; i += 32) {
        int32_t rows = end - i < 32 ? end - i : 32;
        for (int32_t j = 0; j < args->n; j += 32) {
            amx_product(sums, args, i, j);
            tiles_and_memory();
            for (int32_t r = 0; r < rows; r++) {
                float *out = args->out + (i + r) * args->stride + j;
                const __m512 by = _mm512_set1_ps(args->by[i + r]);
                for (int32_t c = 0; c < 32; c += 16) {
                    __m512 x = _mm512_mul_ps(_mm512_load_ps(sums + 32 * r + c), by);
                    if (args->keep != NULL) {
                        __m512 keep = _mm512_set1_ps(args->keep[i + r]);
                        x = _mm512_fmadd_ps(_mm512_loadu_ps(out + c), keep, x);
                    }
                    _mm512_storeu_ps(out + c, x);
                }
            }
            tiles_and_memory();
        }
    }
}

static const struct product_engine amx_products = {amx_left, amx_right, amx_multiply};

#endif
