/* SPDX-License-Identifier: Apache-2.0 */
/* Products of floats as 16-bit whole numbers on AVX512_VNNI, at twice float32's rate. Each row of
 * the left and column of the right becomes one of norm 32700: by Cauchy and Schwarz no sum of
 * products, in part or whole, leaves 32 bits, and sums are exact. What rounding loses is 1e-5 of
 * the product of both norms, where bf16 loses 1e-4 of it. What is not finite makes a norm that is
 * not, which its row or column is multiplied with.
 *
 * Right operands hold pairs: [k / 2][n][2]. 6 x 4 accumulators, as bf16_gemm.h has them. */
#ifndef CPU_SIMD_WHOLE_PRODUCTS_H
#define CPU_SIMD_WHOLE_PRODUCTS_H

#include "bf16_engine.h"

#define WHOLE_NORM 32700.0f
#define LEAST_NORM 1e-30f

static void whole_left(struct product_operand *operand, const float *rows, int64_t stride,
                       int32_t m, int32_t k)
{
    int16_t *out = operand->memory;
    operand->data = out;
    operand->stride = k;
    for (int32_t i = 0; i < m; i++, rows += stride, out += k) {
        __m512 squares = _mm512_setzero_ps();
        for (int32_t p = 0; p < k; p += 16) {
            __m512 x = _mm512_loadu_ps(rows + p);
            squares = _mm512_fmadd_ps(x, x, squares);
        }
        __m512 norm = _mm512_sqrt_ps(_mm512_set1_ps(_mm512_reduce_add_ps(squares)));
        /* the second where either is NaN */
        norm = _mm512_max_ps(_mm512_set1_ps(LEAST_NORM), norm);
        __m512 by = _mm512_div_ps(_mm512_set1_ps(WHOLE_NORM), norm);
        for (int32_t p = 0; p < k; p += 16) {
            __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(rows + p), by));
            _mm256_storeu_si256((__m256i *)(void *)(out + p), _mm512_cvtepi32_epi16(whole));
        }
        operand->scale[i] = _mm512_cvtss_f32(norm) / WHOLE_NORM;
    }
}

static void whole_right(struct product_operand *operand, const float *rows, int64_t stride,
                        int32_t k, int32_t n)
{
    int16_t *out = operand->memory;
    operand->data = out;
    operand->stride = n;
    for (int32_t j = 0; j < n; j += 32) {
        __m512 squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, by[2];
        for (int32_t p = 0; p < k; p++) {
            __m512 x = _mm512_loadu_ps(rows + p * stride + j);
            __m512 y = _mm512_loadu_ps(rows + p * stride + j + 16);
            squares[0] = _mm512_fmadd_ps(x, x, squares[0]);
            squares[1] = _mm512_fmadd_ps(y, y, squares[1]);
        }
        for (int32_t i = 0; i < 2; i++) {
            __m512 norm = _mm512_max_ps(_mm512_set1_ps(LEAST_NORM), _mm512_sqrt_ps(squares[i]));
            by[i] = _mm512_div_ps(_mm512_set1_ps(WHOLE_NORM), norm);
            _mm512_storeu_ps(operand->scale + j + 16 * i,
                             _mm512_mul_ps(norm, _mm512_set1_ps(1.0f / WHOLE_NORM)));
        }
        for (int32_t p = 0; p < k; p += 2) {
#pragma GCC unroll 2
            for (int32_t i = 0; i < 2; i++) {
                const float *at = rows + p * stride + j + 16 * i;
                __m512 x = _mm512_mul_ps(_mm512_loadu_ps(at), by[i]);
                __m512 y = _mm512_mul_ps(_mm512_loadu_ps(at + stride), by[i]);
                __m512i pairs =
                    _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_cvtps_epi32(x),
                                            _mm512_slli_epi32(_mm512_cvtps_epi32(y), 16));
                _mm512_storeu_si512(out + (int64_t)p * n + 2 * (j + 16 * i), pairs);
            }
        }
    }
}

/* rows x 64 columns from (first, column) on, or 32 of `vectors` 2 */
INLINE void whole_block(const int rows, const int vectors, const struct product_args *args,
                        int32_t first, int32_t column)
{
    const int64_t lda = args->left->stride, ldb = args->right->stride;
    const int16_t *a = (const int16_t *)args->left->data + first * lda;
    const int16_t *b = (const int16_t *)args->right->data + 2 * column;
    __m512i sum[6][4];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            sum[i][j] = _mm512_setzero_si512();
        }
    }
    for (int32_t p = 0; p < args->k; p += 2) {
        __m512i right[4];
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            right[j] = _mm512_loadu_si512(b + p * ldb + j * 32);
        }
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            __m512i left = pair_broadcast((const uint16_t *)(a + i * lda + p));
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) {
                sum[i][j] = dot_words(sum[i][j], left, right[j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        float *out = args->out + (first + i) * args->stride + column;
        const float *scale = args->right->scale + column;
        __m512 by = _mm512_set1_ps(args->by[first + i] * args->left->scale[first + i]);
        __m512 keep = _mm512_set1_ps(args->keep != NULL ? args->keep[first + i] : 0.0f);
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[i][j]), by);
            x = _mm512_mul_ps(x, _mm512_loadu_ps(scale + 16 * j));
            if (args->keep != NULL) {
                x = _mm512_fmadd_ps(_mm512_loadu_ps(out + 16 * j), keep, x);
            }
            _mm512_storeu_ps(out + 16 * j, x);
        }
    }
}

INLINE void whole_rows(const int vectors, const struct product_args *args, int32_t column)
{
    const int32_t end = args->first + args->m;
    int32_t i = args->first;
    for (; i + 6 <= end; i += 6) {
        whole_block(6, vectors, args, i, column);
    }
    for (; i + 2 <= end; i += 2) {
        whole_block(2, vectors, args, i, column);
    }
    if (i < end) {
        whole_block(1, vectors, args, i, column);
    }
}

static void whole_multiply(const struct product_args *args)
{
    int32_t j = 0;
    for (; j + 64 <= args->n; j += 64) {
        whole_rows(4, args, j);
    }
    if (j < args->n) {
        whole_rows(2, args, j);
    }
}

static const struct product_engine whole_products = {whole_left, whole_right, whole_multiply};

#endif
