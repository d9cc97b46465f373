/* SPDX-License-Identifier: Apache-2.0 */
/* The bf16 kernels on Advanced SIMD's BFDOT: bf16 products, float32 sums. Packed operands hold
 * pairs, as bf16_tile.h's do: keys [depth / 2][TILE_KEYS][2], values [keys / 2][width][2].
 *
 * gemm: 6 x 4 accumulators; 4 pairs of a row of a are one register, of which each dot instruction
 * takes its lane: 96 of them for 16 loads of b and 6 of a. */
#ifndef CPU_SIMD_BFDOT_TILE_H
#define CPU_SIMD_BFDOT_TILE_H

#include "bf16_rows.h"
#include "f32_decode.h"

INLINE bfloat16x8_t load_pairs(const uint16_t *p)
{
    return vreinterpretq_bf16_u16(vld1q_u16(p));
}

/* One pair in all lanes. */
INLINE bfloat16x8_t pair_broadcast(const uint16_t *p)
{
    uint32_t pair;
    memcpy(&pair, p, sizeof pair);
    return vreinterpretq_bf16_u32(vdupq_n_u32(pair));
}

/* The products of one pair of k: `lane` of a's registers, with the row of b that belongs to it. */
#define BFDOT_LANE(lane)                                                                           \
    for (int j = 0; j < vectors; j++) {                                                            \
        column[j] = load_pairs(b + (p + 2 * (lane)) * ldb + j * 8);                                \
    }                                                                                              \
    _Pragma("GCC unroll 8") for (int i = 0; i < rows; i++)                                         \
    {                                                                                              \
        _Pragma("GCC unroll 8") for (int j = 0; j < vectors; j++)                                  \
        {                                                                                          \
            sum[i][j] = vbfdotq_laneq_f32(sum[i][j], column[j], left[i], lane);                    \
        }                                                                                          \
    }

INLINE void bf16_block(const int rows, const int vectors, float *c, int64_t ldc, const uint16_t *a,
                       int64_t lda, const uint16_t *b, int64_t ldb, int32_t k, int accumulate)
{
    vf sum[6][4];
    bfloat16x8_t left[6];
    bfloat16x8_t column[4];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            sum[i][j] = accumulate ? vf_load(c + i * ldc + j * 4) : vf_set1(0.0f);
        }
    }
    int64_t p = 0;
    for (; p + 8 <= k; p += 8) {
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            left[i] = load_pairs(a + i * lda + p);
        }
        BFDOT_LANE(0)
        BFDOT_LANE(1)
        BFDOT_LANE(2)
        BFDOT_LANE(3)
    }
    for (; p < k; p += 2) {
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            left[i] = pair_broadcast(a + i * lda + p);
        }
        BFDOT_LANE(0)
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            vf_store(c + i * ldc + j * 4, sum[i][j]);
        }
    }
}

static void bf16_gemm(float *c, int64_t ldc, const void *a, int64_t lda, const void *b, int64_t ldb,
                      int32_t m, int32_t n, int32_t k, int accumulate)
{
    for (int32_t j = 0; j < n; j += 16) {
        const uint16_t *left = a;
        const uint16_t *right = (const uint16_t *)b + 2 * j;
        float *out = c + j;
        int32_t rest = m;
        for (; rest >= 6; rest -= 6, left += 6 * lda, out += 6 * ldc) {
            bf16_block(6, 4, out, ldc, left, lda, right, ldb, k, accumulate);
        }
        if (rest >= 4) {
            bf16_block(4, 4, out, ldc, left, lda, right, ldb, k, accumulate);
            rest -= 4, left += 4 * lda, out += 4 * ldc;
        }
        for (; rest > 0; rest--, left += lda, out += ldc) {
            bf16_block(1, 4, out, ldc, left, lda, right, ldb, k, accumulate);
        }
    }
}

static int bf16_pack_values(void *packed, const void *const *rows, int32_t n, int32_t n_padded,
                            int32_t width)
{
    uint16_t *out = packed;
    const uint16x8_t exponent = vdupq_n_u16(0x7f80); /* all ones: infinite or NaN */
    uint16x8_t non_finite = vdupq_n_u16(0);
    for (int32_t i = 0; i < n_padded; i += 2) {
        for (int32_t d = 0; d < width; d += 8) {
            uint16x8_t even = i < n ? vld1q_u16((const uint16_t *)rows[i] + d) : vdupq_n_u16(0);
            uint16x8_t odd =
                i + 1 < n ? vld1q_u16((const uint16_t *)rows[i + 1] + d) : vdupq_n_u16(0);
            non_finite = vorrq_u16(non_finite, vceqq_u16(vandq_u16(even, exponent), exponent));
            non_finite = vorrq_u16(non_finite, vceqq_u16(vandq_u16(odd, exponent), exponent));
            vst1q_u16(out + (int64_t)i * width + 2 * d, vzip1q_u16(even, odd));
            vst1q_u16(out + (int64_t)i * width + 2 * d + 8, vzip2q_u16(even, odd));
        }
    }
    return vmaxvq_u16(non_finite) != 0;
}

static void bf16_softmax(const struct softmax_args *args)
{
    tile_softmax(args, true);
}

static void bf16_decode_scores(float *scores, const void *q, const struct decode_args *args)
{
    tile_decode_scores(scores, q, args, true);
}

static void bf16_decode_values(float *acc, const void *p, const struct decode_args *args)
{
    tile_decode_values(acc, p, args, true);
}

static const struct decode_kernels bf16_decode = {.scores = bf16_decode_scores,
                                                  .values = bf16_decode_values};

#endif
