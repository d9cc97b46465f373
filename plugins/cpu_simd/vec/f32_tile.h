/* SPDX-License-Identifier: Apache-2.0 */
/* The float32 kernels and the row operations over the vectors of one ISA. Included once by each
 * ISA's file after its vec_*.h; everything here is static.
 *
 * gemm: VF_ROWS x VF_COLUMNS accumulators, 2 VF_ROWS VF_COLUMNS VF_WIDTH FLOPs for VF_COLUMNS
 * vector loads and VF_ROWS broadcasts: the FMA units are the limit while b comes from L2. */
#ifndef CPU_SIMD_F32_TILE_H
#define CPU_SIMD_F32_TILE_H

#include <math.h>

#include "cpu_simd/kernels.h"

/* c = a b; pointers are those of the first row and column. With pairs of bf16 as elements, strides
 * and k count pairs. */
struct tile_product {
    float *c;
    const float *a, *b;
    int64_t ldc, lda, ldb;
    int32_t k;
    bool accumulate; /* c += a b */
    /* or, where `by` is not NULL, c[i] = keep[i] c[i] + by[i] (a b)[i]; keep NULL: 0 */
    const float *keep, *by;
};

/* sum += a b of rows x vectors; both and `pairs` are constants where this is inlined */
INLINE void tile_sums(vf (*sum)[VF_COLUMNS], const int rows, const int vectors, const float *a,
                      int64_t lda, const float *b, int64_t ldb, int32_t k, const bool pairs)
{
    for (int32_t p = 0; p < k; p++) {
        vf column[VF_COLUMNS];
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            column[j] = vf_load(b + p * ldb + j * VF_WIDTH);
        }
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            vf left = vf_broadcast(a + i * lda + p);
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) {
                sum[i][j] = vf_dot(left, column[j], sum[i][j], pairs);
            }
        }
    }
}

/* `scaled`, a constant: by `by` and `keep` */
INLINE void tile_block(const int rows, const int vectors, const struct tile_product *of,
                       const bool pairs, const bool scaled)
{
    vf sum[VF_ROWS][VF_COLUMNS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            sum[i][j] = !scaled && of->accumulate ? vf_load(of->c + i * of->ldc + j * VF_WIDTH)
                                                  : vf_set1(0.0f);
        }
    }
    tile_sums(sum, rows, vectors, of->a, of->lda, of->b, of->ldb, of->k, pairs);
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        vf by = vf_set1(scaled ? of->by[i] : 0.0f);
        vf keep = vf_set1(scaled && of->keep != NULL ? of->keep[i] : 0.0f);
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            float *out = of->c + i * of->ldc + j * VF_WIDTH;
            vf x = scaled ? vf_mul(sum[i][j], by) : sum[i][j];
            vf_store(out, scaled && of->keep != NULL ? vf_fma(vf_load(out), keep, x) : x);
        }
    }
}

INLINE void tile_advance(struct tile_product *of, int32_t rows)
{
    of->c += rows * of->ldc;
    of->a += rows * of->lda;
    of->by = of->by != NULL ? of->by + rows : NULL;
    of->keep = of->keep != NULL ? of->keep + rows : NULL;
}

INLINE void tile_rows(const int vectors, struct tile_product of, int32_t m, const bool pairs,
                      const bool scaled)
{
    for (; m >= VF_ROWS; m -= VF_ROWS, tile_advance(&of, VF_ROWS)) {
        tile_block(VF_ROWS, vectors, &of, pairs, scaled);
    }
    for (; VF_ROWS > 4 && m >= 4; m -= 4, tile_advance(&of, 4)) {
        tile_block(4, vectors, &of, pairs, scaled);
    }
    for (; m >= 2; m -= 2, tile_advance(&of, 2)) {
        tile_block(2, vectors, &of, pairs, scaled);
    }
    if (m > 0) {
        tile_block(1, vectors, &of, pairs, scaled);
    }
}

/* m rows and n columns, of whole vectors */
INLINE void tile_gemm(struct tile_product of, int32_t m, int32_t n, const bool pairs,
                      const bool scaled)
{
    const int32_t most = VF_COLUMNS * VF_WIDTH, some = 2 * VF_WIDTH;
    for (; n >= most; n -= most, of.c += most, of.b += most) {
        tile_rows(VF_COLUMNS, of, m, pairs, scaled);
    }
    for (; VF_WIDTH == 16 && n >= some; n -= some, of.c += some, of.b += some) {
        tile_rows(2, of, m, pairs, scaled);
    }
    for (; n > 0; n -= VF_WIDTH, of.c += VF_WIDTH, of.b += VF_WIDTH) {
        tile_rows(1, of, m, pairs, scaled);
    }
}

static void f32_gemm(float *c, int64_t ldc, const void *a, int64_t lda, const void *b, int64_t ldb,
                     int32_t m, int32_t n, int32_t k, int accumulate)
{
    const struct tile_product of = {c, a, b, ldc, lda, ldb, k, accumulate, NULL, NULL};
    tile_gemm(of, m, n, false, false);
}

static void f32_pack_keys(void *packed, const void *const *rows, int32_t n, int32_t columns,
                          int32_t depth)
{
    float *out = packed;
    for (int32_t j = 0; j < columns; j += VF_WIDTH) {
        for (int32_t d = 0; d < depth; d += VF_WIDTH) {
            vf block[VF_WIDTH];
#pragma GCC unroll 16
            for (int32_t i = 0; i < VF_WIDTH; i++) {
                block[i] = j + i < n ? vf_load((const float *)rows[j + i] + d) : vf_set1(0.0f);
            }
            vf_transpose(block);
#pragma GCC unroll 16
            for (int32_t i = 0; i < VF_WIDTH; i++) {
                vf_store(out + (int64_t)(d + i) * TILE_KEYS + j, block[i]);
            }
        }
    }
}

static int f32_pack_values(void *packed, const void *const *rows, int32_t n, int32_t n_padded,
                           int32_t width)
{
    float *out = packed;
    vf zero = vf_set1(0.0f);
    vf non_finite = zero; /* 0 x: NaN as soon as an x is not finite */
    for (int32_t i = 0; i < n_padded; i++) {
        for (int32_t d = 0; d < width; d += VF_WIDTH) {
            vf x = i < n ? vf_load((const float *)rows[i] + d) : zero;
            non_finite = vf_fma(x, zero, non_finite);
            vf_store(out + (int64_t)i * width + d, x);
        }
    }
    float sum = vf_sum(non_finite);
    return sum != sum;
}

INLINE float f32_row_max(const float *s, int32_t begin, int32_t end, int32_t low, int32_t high)
{
    vf best = vf_set1(-INFINITY);
    for (int32_t j = begin; j < end; j += VF_WIDTH) {
        vf x = vf_load(s + j);
        if (j < low || j + VF_WIDTH > high) {
            x = vf_keep(x, j, low, high, -INFINITY);
        }
        best = vf_max(x, best);
    }
    return vf_greatest(best);
}

/* Updates row_max of a row; returns it, and sets scores_scale, the factor for what was summed under
 * the old one. */
INLINE float update_row_max(const struct softmax_args *args, int32_t r, float best)
{
    float old = args->row_max[r];
    args->scores_scale[r] = 1.0f;
    if (!(best > old + RESCALE_THRESHOLD)) {
        return old == -INFINITY ? 0.0f : old;
    }
    args->row_max[r] = best;
    if (old != -INFINITY) {
        args->scores_scale[r] = exp2f(old - best);
        args->row_sum[r] *= args->scores_scale[r];
    }
    return best;
}

/* The sum is of the probabilities before they are rounded for the values: it is the log-sum-exp. */
INLINE void tile_softmax(const struct softmax_args *args, const bool pairs)
{
    const int vectors = pairs ? 2 : 1;
    vf factor = vf_set1(args->softmax_scale_log2);
    for (int32_t r = 0; r < args->rows; r++) {
        float *s = args->scores + (int64_t)r * SCORE_STRIDE;
        int32_t low = args->low[r];
        int32_t high = args->high[r];
        float best = f32_row_max(s, args->begin, args->end, low, high) * args->softmax_scale_log2;
        vf minus = vf_set1(-update_row_max(args, r, best));
        vf sum = vf_set1(0.0f);
        for (int32_t j = args->begin; j < args->end; j += vectors * VF_WIDTH) {
            vf p[2];
#pragma GCC unroll 2
            for (int32_t v = 0, i = j; v < vectors; v++, i += VF_WIDTH) {
                vf exponent = vf_fma(vf_load(s + i), factor, minus);
                p[v] = pairs ? vf_exp2_short(exponent) : vf_exp2(exponent);
                if (i < low || i + VF_WIDTH > high) {
                    p[v] = vf_keep(p[v], i, low, high, 0.0f);
                }
            }
            sum = vf_add(sum, pairs ? vf_add(p[0], p[1]) : p[0]);
#pragma GCC unroll 2
            for (int32_t v = 0, i = j; v < vectors; v++, i += VF_WIDTH) {
                if (args->value_scale != NULL) {
                    vf scaled = vf_mul(p[v], vf_load(args->value_scale + i));
                    p[v] = vf_keep(scaled, i, low, high, 0.0f);
                }
            }
            if (pairs) {
                vf_store_pairs((uint16_t *)s + j, p[0], p[1]);
            } else {
                vf_store(s + j, p[0]);
            }
        }
        args->row_sum[r] += vf_sum(sum);
    }
}

static void f32_softmax(const struct softmax_args *args)
{
    tile_softmax(args, false);
}

/* tanh x as x P(x^2) / Q(x^2), with a relative error of 3e-7 everywhere: minimax over 0 .. 9 by
 * Lawson's iteration, beyond which it is 1. NaN stays NaN. */
INLINE vf vf_tanh(vf x)
{
    static const float p[] = {0.9999999936f,    0.1308476015f,    0.003104794603f,  1.116310562e-5f,
                              -2.026117604e-8f, 5.295454326e-11f, -8.534302193e-14f};
    static const float q[] = {1.0f, 0.464180874f, 0.02449851537f, 0.0002547367508f};
    vf limited = vf_max(vf_set1(-9.0f), vf_min(vf_set1(9.0f), x));
    vf square = vf_mul(limited, limited);
    vf above = vf_set1(p[6]), below = vf_set1(q[3]);
#pragma GCC unroll 6
    for (int i = 5; i >= 0; i--) {
        above = vf_fma(above, square, vf_set1(p[i]));
    }
#pragma GCC unroll 3
    for (int i = 2; i >= 0; i--) {
        below = vf_fma(below, square, vf_set1(q[i]));
    }
    return vf_div(vf_mul(limited, above), below);
}

INLINE vf soft_capped(vf s, float cap)
{
    return vf_mul(vf_tanh(vf_mul(s, vf_set1(1.0f / cap))), vf_set1(cap));
}

static void row_terms(float *scores, int32_t n, const struct score_terms *terms)
{
    vf scale = vf_set1(terms->scale);
    for (int32_t j = 0; j < n; j += VF_WIDTH) {
        vf s = vf_mul(vf_load(scores + j), scale);
        if (terms->key_scale != NULL) {
            s = vf_mul(s, vf_load(terms->key_scale + j));
        }
        if (terms->soft_cap > 0.0f) {
            s = soft_capped(s, terms->soft_cap);
        }
        if (terms->alibi != ALIBI_NONE) {
            vf distance = vf_sub(vf_set1(terms->distance), vf_ramp((float)j));
            distance = terms->alibi == ALIBI_LINEAR ? vf_abs(distance)
                                                    : vf_sqrt(vf_max(vf_set1(0.0f), distance));
            s = vf_sub(s, vf_mul(vf_set1(terms->slope), distance));
        }
        vf_store(scores + j, s);
    }
}

static void row_scale(float *row, float factor, int32_t n)
{
    vf by = vf_set1(factor);
    for (int32_t j = 0; j < n; j += VF_WIDTH) {
        vf_store(row + j, vf_mul(vf_load(row + j), by));
    }
}

static void row_add_scaled(float *row, const float *other, float factor, int32_t n)
{
    vf by = vf_set1(factor);
    for (int32_t j = 0; j < n; j += VF_WIDTH) {
        vf_store(row + j, vf_fma(vf_load(other + j), by, vf_load(row + j)));
    }
}

/* Sums and differences of elements `half` apart; a constant where this is inlined and small. */
INLINE void hadamard_stage(float *restrict row, int32_t n, const int32_t half)
{
    for (int32_t first = 0; first < n; first += 2 * half) {
        for (int32_t d = first; d < first + half; d++) {
            float x = row[d], y = row[d + half];
            row[d] = x + y;
            row[d + half] = x - y;
        }
    }
}

static void row_hadamard(float *row, int32_t n)
{
    if (n >= 16) {
        hadamard_stage(row, n, 1);
        hadamard_stage(row, n, 2);
        hadamard_stage(row, n, 4);
        hadamard_stage(row, n, 8);
    }
    for (int32_t half = n >= 16 ? 16 : 1; half < n; half *= 2) {
        hadamard_stage(row, n, half);
    }
}

static void row_nibbles(int8_t *restrict codes, const uint8_t *restrict packed, int32_t zero,
                        int32_t n)
{
    int8_t less = (int8_t)zero;
    for (int32_t i = 0; i < n / 2; i++) {
        codes[2 * i] = (int8_t)((packed[i] & 15) - less);
        codes[2 * i + 1] = (int8_t)((packed[i] >> 4) - less);
    }
}

#define DEFINE_UNPACK(name, type, load, convert)                                                   \
    static void name(void *destination, const void *source, int64_t n)                             \
    {                                                                                              \
        float *out = destination;                                                                  \
        const type *in = source;                                                                   \
        int64_t i = 0;                                                                             \
        for (; i + VF_WIDTH <= n; i += VF_WIDTH) {                                                 \
            vf_store(out + i, load(in + i));                                                       \
        }                                                                                          \
        for (; i < n; i++) {                                                                       \
            out[i] = convert(in[i]);                                                               \
        }                                                                                          \
    }
#define SAME(x) (x)
DEFINE_UNPACK(f32_from_f32, float, vf_load, SAME)
DEFINE_UNPACK(f32_from_f16, uint16_t, vf_load_f16, number_from_f16)
DEFINE_UNPACK(f32_from_bf16, uint16_t, vf_load_bf16, number_from_bf16)
DEFINE_UNPACK(f32_from_e4m3, uint8_t, vf_load_e4m3, number_from_e4m3)
DEFINE_UNPACK(f32_from_e5m2, uint8_t, vf_load_e5m2, number_from_e5m2)
DEFINE_UNPACK(f32_from_int8, int8_t, vf_load_int8, SAME)

#define DEFINE_STORE(name, type, put, convert)                                                     \
    static void name(void *destination, const float *source, float factor, int64_t n)              \
    {                                                                                              \
        type *out = destination;                                                                   \
        vf by = vf_set1(factor);                                                                   \
        int64_t i = 0;                                                                             \
        for (; i + VF_WIDTH <= n; i += VF_WIDTH) {                                                 \
            put(out + i, vf_mul(vf_load(source + i), by));                                         \
        }                                                                                          \
        for (; i < n; i++) {                                                                       \
            out[i] = convert(source[i] * factor);                                                  \
        }                                                                                          \
    }
DEFINE_STORE(f32_to_f32_row, float, vf_store, SAME)
DEFINE_STORE(f32_to_f16_row, uint16_t, vf_store_f16, f32_to_f16)
DEFINE_STORE(f32_to_bf16_row, uint16_t, vf_store_bf16, f32_to_bf16)

#define ROW_OPERATIONS                                                                             \
    .terms = row_terms, .scale_row = row_scale, .hadamard = row_hadamard, .nibbles = row_nibbles,  \
    .add_scaled = row_add_scaled, .store = {f32_to_f32_row, f32_to_f16_row, f32_to_bf16_row},      \
    .delta = &delta_operations, .products = &f32_products, .codes = &code_operations,              \
    .blocks = block_operations, .merge_weights = merge_weights,                                    \
    .blend = {blend_f32, blend_f16, blend_bf16}, .sum_heads = sum_heads, .highest = highest,       \
    .count_above = count_above, .keep_above = keep_above

#include "block_codes.h"
#include "codes_write.h"
#include "delta.h"
#include "head_sums.h"
#include "merge_rows.h"

#endif
