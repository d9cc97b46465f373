/* SPDX-License-Identifier: Apache-2.0 */
/* The bf16 kernels on Advanced SIMD's BFDOT: bf16 products, float32 sums. Packed operands hold
 * pairs, as bf16_tile.h's do: keys [depth / 2][TILE_KEYS][2], values [keys / 2][width][2].
 *
 * gemm: 6 x 4 accumulators; 4 pairs of a row of a are one register, of which each dot instruction
 * takes its lane: 96 of them for 16 loads of b and 6 of a. */
#ifndef CPU_SIMD_BFDOT_TILE_H
#define CPU_SIMD_BFDOT_TILE_H

#include "f32_tile.h"

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

INLINE bfloat16x8_t to_bf16(vf low, vf high)
{
    return vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high);
}

INLINE void store_pairs(uint16_t *p, bfloat16x8_t x)
{
    vst1q_u16(p, vreinterpretq_u16_bf16(x));
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

/* A pair of bf16 is one 32-bit element of the transposition. */
static void bf16_pack_keys(void *packed, const void *const *rows, int32_t n, int32_t columns,
                           int32_t depth)
{
    float *out = packed;
    for (int32_t j = 0; j < columns; j += 4) {
        for (int32_t d = 0; d < depth; d += 8) {
            vf block[4];
            for (int32_t i = 0; i < 4; i++) {
                block[i] = j + i < n
                               ? vreinterpretq_f32_u16(vld1q_u16((const uint16_t *)rows[j + i] + d))
                               : vf_set1(0.0f);
            }
            vf_transpose(block);
            for (int32_t i = 0; i < 4; i++) {
                vf_store(out + (int64_t)(d / 2 + i) * TILE_KEYS + j, block[i]);
            }
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

/* 2^x to 7.5e-5, less than the rounding of a bf16 */
INLINE vf exp2_short(vf x)
{
    vf limited = vf_max(vf_set1(-127.0f), x);
    vf whole = vrndmq_f32(limited);
    vf f = vsubq_f32(limited, whole);
    vf p = vf_set1(0.0780245227f);
    p = vf_fma(p, f, vf_set1(0.226067155f));
    p = vf_fma(p, f, vf_set1(0.695833541f));
    p = vf_fma(p, f, vf_set1(0.999925219f));
    return vf_mul(p, vf_power(whole));
}

/* The sum is of the probabilities before they are rounded for the values: it is the log-sum-exp. */
static void bf16_softmax(const struct softmax_args *args)
{
    vf factor = vf_set1(args->softmax_scale_log2);
    for (int32_t r = 0; r < args->rows; r++) {
        float *s = args->scores + (int64_t)r * SCORE_STRIDE;
        uint16_t *p_row = (uint16_t *)s;
        int32_t low = args->low[r];
        int32_t high = args->high[r];
        float best = f32_row_max(s, args->begin, args->end, low, high) * args->softmax_scale_log2;
        vf minus = vf_set1(-update_row_max(args, r, best));
        vf sum = vf_set1(0.0f);
        for (int32_t j = args->begin; j < args->end; j += 8) {
            vf p0 = exp2_short(vf_fma(vf_load(s + j), factor, minus));
            vf p1 = exp2_short(vf_fma(vf_load(s + j + 4), factor, minus));
            if (j < low || j + 8 > high) {
                p0 = vf_keep(p0, j, low, high, 0.0f);
                p1 = vf_keep(p1, j + 4, low, high, 0.0f);
            }
            sum = vf_add(sum, vf_add(p0, p1));
            if (args->value_scale != NULL) {
                p0 = vf_mul(p0, vf_load(args->value_scale + j));
                p1 = vf_mul(p1, vf_load(args->value_scale + j + 4));
                p0 = vf_keep(p0, j, low, high, 0.0f);
                p1 = vf_keep(p1, j + 4, low, high, 0.0f);
            }
            store_pairs(p_row + j, to_bf16(p0, p1));
        }
        args->row_sum[r] += vf_sum(sum);
    }
}

/* Rows of every storage type to bf16. fp8 and int8 fit into bf16 exactly; scales are applied to
 * scores and outputs, never here. */
static void bf16_from_bf16(void *destination, const void *source, int64_t n)
{
    memcpy(destination, source, (size_t)n * 2);
}

#define DEFINE_UNPACK_BF16(name, type, load, convert)                                              \
    static void name(void *destination, const void *source, int64_t n)                             \
    {                                                                                              \
        uint16_t *out = destination;                                                               \
        const type *in = source;                                                                   \
        int64_t i = 0;                                                                             \
        for (; i + 8 <= n; i += 8) {                                                               \
            store_pairs(out + i, to_bf16(load(in + i), load(in + i + 4)));                         \
        }                                                                                          \
        for (; i < n; i++) {                                                                       \
            out[i] = f32_to_bf16(convert(in[i]));                                                  \
        }                                                                                          \
    }
DEFINE_UNPACK_BF16(bf16_from_f32, float, vf_load, SAME)
DEFINE_UNPACK_BF16(bf16_from_f16, uint16_t, vf_load_f16, f16_to_f32)
DEFINE_UNPACK_BF16(bf16_from_e4m3, uint8_t, vf_load_e4m3, e4m3_to_f32)
DEFINE_UNPACK_BF16(bf16_from_e5m2, uint8_t, vf_load_e5m2, e5m2_to_f32)
DEFINE_UNPACK_BF16(bf16_from_int8, int8_t, vf_load_int8, SAME)

#endif
