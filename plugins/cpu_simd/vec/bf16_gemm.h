/* SPDX-License-Identifier: Apache-2.0 */
/* gemm on AVX512_BF16: 6 x 4 accumulators, 24 dot instructions for 4 loads and 6 embedded
 * broadcasts; Zen 5 retires two of 64 FLOPs a cycle. */
#ifndef CPU_SIMD_BF16_GEMM_H
#define CPU_SIMD_BF16_GEMM_H

#include "bf16_tile.h"

INLINE void bf16_block(const int rows, const int vectors, float *c, int64_t ldc, const uint16_t *a,
                       int64_t lda, const uint16_t *b, int64_t ldb, int32_t k, int accumulate)
{
    __m512 sum[6][4];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            sum[i][j] = accumulate ? _mm512_loadu_ps(c + i * ldc + j * 16) : _mm512_setzero_ps();
        }
    }
    for (int32_t p = 0; p < k; p += 2) {
        __m512i column[4];
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            column[j] = _mm512_loadu_si512(b + p * ldb + j * 32);
        }
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            __m512i left = pair_broadcast(a + i * lda + p);
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) {
                sum[i][j] = _mm512_dpbf16_ps(sum[i][j], bf16_bits(left), bf16_bits(column[j]));
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            _mm512_storeu_ps(c + i * ldc + j * 16, sum[i][j]);
        }
    }
}

INLINE void bf16_rows(const int vectors, float *c, int64_t ldc, const uint16_t *a, int64_t lda,
                      const uint16_t *b, int64_t ldb, int32_t m, int32_t k, int accumulate)
{
    for (; m >= 6; m -= 6, a += 6 * lda, c += 6 * ldc) {
        bf16_block(6, vectors, c, ldc, a, lda, b, ldb, k, accumulate);
    }
    if (m >= 4) {
        bf16_block(4, vectors, c, ldc, a, lda, b, ldb, k, accumulate);
        m -= 4, a += 4 * lda, c += 4 * ldc;
    }
    if (m >= 2) {
        bf16_block(2, vectors, c, ldc, a, lda, b, ldb, k, accumulate);
        m -= 2, a += 2 * lda, c += 2 * ldc;
    }
    if (m > 0) {
        bf16_block(1, vectors, c, ldc, a, lda, b, ldb, k, accumulate);
    }
}

static void bf16_gemm(float *c, int64_t ldc, const void *a, int64_t lda, const void *b, int64_t ldb,
                      int32_t m, int32_t n, int32_t k, int accumulate)
{
    const uint16_t *right = b;
    int32_t j = 0;
    for (; j + 64 <= n; j += 64) {
        bf16_rows(4, c + j, ldc, a, lda, right + 2 * j, ldb, m, k, accumulate);
    }
    if (j + 32 <= n) {
        bf16_rows(2, c + j, ldc, a, lda, right + 2 * j, ldb, m, k, accumulate);
        j += 32;
    }
    if (j < n) {
        bf16_rows(1, c + j, ldc, a, lda, right + 2 * j, ldb, m, k, accumulate);
    }
}

#endif
