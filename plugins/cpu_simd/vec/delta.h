/* SPDX-License-Identifier: Apache-2.0 */
/* The inner loops of the gated delta rule that are no gemm, over the vectors of one ISA: the
 * causal convolution of a row, its norm, and one token of the recurrence. Per value row of the
 * state and token: Dk floats read and written, 8 Dk FLOPs, so the memory bounds a decode. */
#ifndef CPU_SIMD_DELTA_H
#define CPU_SIMD_DELTA_H

#include <stdbool.h>

#include "f32_tile.h"

#define L2_EPSILON 1e-6f

/* y / (1 + e^-x) */
INLINE vf activated(vf y, vf x)
{
    vf e = vf_exp2(vf_mul(x, vf_set1(-LOG2_E)));
    return vf_quotient(y, vf_add(vf_set1(1.0f), e));
}

INLINE vf silu(vf x)
{
    return activated(x, x);
}

/* z <- silu(z), or the logistic function of it; n is a multiple of COLUMN_MULTIPLE. */
static void delta_activate(float *z, int32_t n, bool sigmoid)
{
    const vf one = vf_set1(1.0f);
    for (int32_t i = 0; i < n; i += VF_WIDTH) {
        const vf x = vf_load(z + i);
        vf_store(z + i, activated(sigmoid ? one : x, x));
    }
}

/* x <- x y by; n is a multiple of COLUMN_MULTIPLE. */
static void delta_multiply(float *x, const float *y, float by, int32_t n)
{
    for (int32_t i = 0; i < n; i += VF_WIDTH) {
        vf_store(x + i, vf_mul(vf_load(x + i), vf_mul(vf_load(y + i), vf_set1(by))));
    }
}

#define CONSTANT_WIDTH 4 /* the size in most models */
#define CONVOLVED_ROWS 4
#define ROWS_AHEAD                                                                                 \
    8 /* prefetch distance of inputs, which are too far apart for the hardware's prefetcher */

INLINE vf convolved_input(const void *row, int32_t c, const int32_t element)
{
    return element == ELEMENT_BF16  ? vf_load_bf16((const uint16_t *)row + c)
           : element == ELEMENT_F16 ? vf_load_f16((const uint16_t *)row + c)
                                    : vf_load((const float *)row + c);
}

/* Rows t .. t + rows - 1; width, element and rows are constants where this is inlined, so that rows
 * share the loads of taps and inputs. Row by row: with columns outside, lines of rows that far
 * apart displace each other. */
INLINE void convolve_rows(const struct convolve_args *args, const int32_t width,
                          const int32_t element, int32_t t, const int32_t rows)
{
    const int64_t stride = args->stride, x_bytes = args->x_bytes;
    const int32_t bytes = element == ELEMENT_F32 ? 4 : 2;
    const char *x = (const char *)args->x + t * x_bytes;
    const char *prefetch = x + (width - 1 + ROWS_AHEAD) * x_bytes;
    const bool asks = t + ROWS_AHEAD + rows <= args->rows + args->rows_after;
    float *y = args->y + t * stride;
    for (int32_t c = 0; c < args->n; c += VF_WIDTH) {
        vf sum[CONVOLVED_ROWS];
        vf bias = vf_load(args->bias + c);
#pragma GCC unroll 4
        for (int32_t r = 0; r < rows; r++) {
            sum[r] = bias;
        }
#pragma GCC unroll 4
        for (int32_t i = 0; i < width; i++) {
            vf tap = vf_load(args->weights + i * stride + c);
#pragma GCC unroll 4
            for (int32_t r = 0; r < rows; r++) {
                sum[r] = vf_fma(tap, convolved_input(x + (r + i) * x_bytes, c, element), sum[r]);
            }
        }
        if (asks && c * bytes % 64 == 0) {
#pragma GCC unroll 4
            for (int32_t r = 0; r < rows; r++) {
                __builtin_prefetch(prefetch + r * x_bytes + (int64_t)c * bytes);
            }
        }
#pragma GCC unroll 4
        for (int32_t r = 0; r < rows; r++) {
            vf_store(y + r * stride + c, args->with_silu ? silu(sum[r]) : sum[r]);
        }
    }
}

INLINE void convolve(const struct convolve_args *args, const int32_t width, const int32_t element)
{
    int32_t t = 0;
    for (; t + CONVOLVED_ROWS <= args->rows; t += CONVOLVED_ROWS) {
        convolve_rows(args, width, element, t, CONVOLVED_ROWS);
    }
    for (; t < args->rows; t++) {
        convolve_rows(args, width, element, t, 1);
    }
}

INLINE void convolve_elements(const struct convolve_args *args, const int32_t width)
{
    if (args->element == ELEMENT_BF16) {
        convolve(args, width, ELEMENT_BF16);
    } else if (args->element == ELEMENT_F16) {
        convolve(args, width, ELEMENT_F16);
    } else {
        convolve(args, width, ELEMENT_F32);
    }
}

/* y[t]_c = bias_c + sum_i w[i][c] x[t + i][c], then SiLU; n is a multiple of COLUMN_MULTIPLE. */
static void delta_convolve(const struct convolve_args *args)
{
    if (args->width == CONSTANT_WIDTH) {
        convolve_elements(args, CONSTANT_WIDTH);
    } else {
        convolve_elements(args, args->width);
    }
}

/* Columns first .. first + VF_WIDTH - 1 of a chunk's decays, row by row. */
INLINE void decay_columns(const struct decays_args *args, int32_t first)
{
    vf d = vf_set1(0.0f); /* from after these tokens to token t */
    for (int32_t t = first; t < args->count; t++) {
        const int64_t at = t * args->stride + first;
        const bool diagonal = t < first + VF_WIDTH;
        vf kk = vf_load(args->kk + at), qk = vf_load(args->qk + at);
        d = vf_mul(d, vf_set1(args->decay[t]));
        if (diagonal) {
            kk = vf_keep(kk, first, 0, t, 0.0f);
            qk = vf_keep(qk, first, 0, t + 1, 0.0f);
            d = vf_keep(vf_keep(d, first, 0, t, 1.0f), first, 0, t + 1, 0.0f);
        }
        vf_store(args->by_r + at, vf_mul(vf_mul(vf_set1(-args->beta[t]), d), kk));
        vf_store(args->by_q + at, vf_mul(d, qk));
    }
    vf_store(args->d + first, d);
}

static void delta_decays(const struct decays_args *args)
{
    for (int32_t first = 0; first < args->count; first += VF_WIDTH) {
        decay_columns(args, first);
    }
}

static void f32_left(struct product_operand *operand, const float *rows, int64_t stride, int32_t m,
                     int32_t k, const float *by)
{
    float *scaled = operand->memory;
    operand->data = by != NULL ? scaled : rows;
    operand->stride = by != NULL ? k : stride;
    for (int32_t i = 0; by != NULL && i < m; i++) {
        for (int32_t p = 0; p < k; p += VF_WIDTH) {
            vf_store(scaled + (int64_t)i * k + p,
                     vf_mul(vf_load(rows + i * stride + p), vf_load(by + p)));
        }
    }
}

static void f32_right(struct product_operand *operand, const float *rows, int64_t stride,
                      int32_t first, int32_t k, int32_t n)
{
    operand->data = rows;
    operand->stride = stride;
}

static void f32_multiply(const struct product_args *args)
{
    const struct product_operand *left = args->left, *right = args->right;
    const int32_t first = args->first;
    const struct tile_product of = {.c = args->out + first * args->stride,
                                    .a = (const float *)left->data + first * left->stride,
                                    .b = right->data,
                                    .ldc = args->stride,
                                    .lda = left->stride,
                                    .ldb = right->stride,
                                    .k = args->k,
                                    .keep = args->keep != NULL ? args->keep + first : NULL,
                                    .by = args->by + first};
    tile_gemm(of, args->m, args->n, false, true);
    if (args->packed != NULL) {
        f32_right(args->packed, args->out, args->stride, 0, args->m, args->n);
    }
}

/* Rows first .. first + rows - 1, which stay in registers until they have met each other. */
INLINE void solve_block(const int rows, const int vectors, float *x, int32_t n, const float *by,
                        int64_t stride, int32_t first)
{
    vf sum[VF_ROWS][VF_COLUMNS];
    float *row = x + (int64_t)first * n;
    by += first * stride;
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 8
        for (int c = 0; c < vectors; c++) {
            sum[i][c] = vf_load(row + i * (int64_t)n + c * VF_WIDTH);
        }
    }
    tile_sums(sum, rows, vectors, by, stride, x, n, first, false);
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < i; j++) {
            vf left = vf_set1(by[i * stride + first + j]);
#pragma GCC unroll 8
            for (int c = 0; c < vectors; c++) {
                sum[i][c] = vf_fma(left, sum[j][c], sum[i][c]);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < vectors; c++) {
            vf_store(row + i * (int64_t)n + c * VF_WIDTH, sum[i][c]);
        }
    }
}

INLINE void solve_columns(const int vectors, float *x, int32_t n, const float *by, int64_t stride,
                          int32_t count)
{
    int32_t first = 0;
    for (; first + VF_ROWS <= count; first += VF_ROWS) {
        solve_block(VF_ROWS, vectors, x, n, by, stride, first);
    }
    for (; first < count; first++) {
        solve_block(1, vectors, x, n, by, stride, first);
    }
}

static void delta_solve(float *x, int32_t n, const float *by, int64_t stride, int32_t count)
{
    int32_t j = 0;
    for (; j + VF_COLUMNS * VF_WIDTH <= n; j += VF_COLUMNS * VF_WIDTH) {
        solve_columns(VF_COLUMNS, x + j, n, by, stride, count);
    }
    for (; j < n; j += VF_WIDTH) {
        solve_columns(1, x + j, n, by, stride, count);
    }
}

static const struct product_kernels f32_products = {f32_left, f32_right, f32_multiply};

static float delta_dot(const float *a, const float *b, int32_t n)
{
    vf sum = vf_set1(0.0f);
    for (int32_t i = 0; i < n; i += VF_WIDTH) {
        sum = vf_fma(vf_load(a + i), vf_load(b + i), sum);
    }
    return vf_sum(sum);
}

/* Where the sum of squares is no float, its root may be none, and a factor by it subnormal. */
static void normalize_in_double(float *row, int32_t n, float by)
{
    const double norm = sqrt(sum_of_squares(row, n));
    for (int32_t i = 0; i < n; i++) {
        row[i] = (float)((double)row[i] / norm * (double)by);
    }
}

/* Each row times by / its norm; in fours, so that a row's bits do not depend on their number. */
static void delta_normalize(float *x, int32_t rows, int32_t n, float by)
{
    for (int32_t first = 0; first < rows; first += 4) {
        vf sum[4];
        float squares[4];
#pragma GCC unroll 4
        for (int32_t r = 0; r < 4; r++) {
            sum[r] = vf_set1(0.0f);
        }
        for (int32_t i = 0; i < n; i += VF_WIDTH) {
#pragma GCC unroll 4
            for (int32_t r = 0; r < 4; r++) {
                vf part = first + r < rows ? vf_load(x + (int64_t)(first + r) * n + i) : sum[r];
                sum[r] = vf_fma(part, part, sum[r]);
            }
        }
        vf_sum_four(squares, sum[0], sum[1], sum[2], sum[3]);
        for (int32_t r = 0; r < 4 && first + r < rows; r++) {
            float *row = x + (int64_t)(first + r) * n;
            if (isfinite(squares[r])) {
                row_scale(row, by / sqrtf(squares[r] + L2_EPSILON), n);
            } else {
                normalize_in_double(row, n, by);
            }
        }
    }
}

/* log(1 + e) for e of 0 .. 1, as 2 artanh(e / (2 + e)) */
INLINE vf log_of_1_and(vf e)
{
    vf s = vf_quotient(e, vf_add(vf_set1(2.0f), e));
    vf square = vf_mul(s, s);
    vf sum = vf_set1(1.0f / 15);
#pragma GCC unroll 7
    for (int odd = 13; odd > 0; odd -= 2) {
        sum = vf_fma(sum, square, vf_set1(1.0f / (float)odd));
    }
    return vf_mul(vf_add(s, s), sum);
}

/* log(1 + e^x) is max(x, 0) + log(1 + e^-|x|). */
static void delta_gates(float *decay, float *beta, const struct gates_args *args)
{
    const vf log2_e = vf_set1(LOG2_E), one = vf_set1(1.0f);
    for (int32_t t = 0; t < args->count; t += VF_WIDTH) {
        vf x = vf_add(vf_load(args->a + t), vf_set1(args->bias));
        vf small = log_of_1_and(vf_exp2(vf_mul(vf_abs(x), vf_sub(vf_set1(0.0f), log2_e))));
        vf softplus = vf_add(vf_max(vf_set1(0.0f), x), small);
        vf_store(decay + t, vf_exp2(vf_mul(softplus, vf_set1(args->rate * LOG2_E))));
        vf_store(beta + t, activated(one, vf_load(args->b + t)));
    }
}

#define STEP_ROWS 4            /* rows of a state at a time, whose sums share their shuffles */
#define STATE_AHEAD (4096 / 4) /* floats of it to prefetch */

/* Rows d .. d + rows - 1 of the state. With S' = e^g S: r = beta (v - S' k), S = S' + r k^T, and
 * o = S q = S' q + r (k q). */
INLINE void delta_rows(const struct delta_args *args, int32_t d, const int32_t rows)
{
    const int64_t depth = args->depth, whole = depth / VF_WIDTH * VF_WIDTH;
    const float *from = args->from + d * depth;
    float *to = args->to + d * depth;
    const vf decay = vf_set1(args->decay);
    vf by_k[STEP_ROWS], by_q[STEP_ROWS], wide_r[STEP_ROWS];
    float sk[STEP_ROWS], sq[STEP_ROWS], r[STEP_ROWS];
#pragma GCC unroll 4
    for (int32_t n = 0; n < STEP_ROWS; n++) {
        by_k[n] = by_q[n] = vf_set1(0.0f);
    }
    for (int64_t i = 0; i < whole; i += VF_WIDTH) {
        const vf k = vf_load(args->k + i), q = vf_load(args->q + i);
#pragma GCC unroll 4
        for (int32_t n = 0; n < rows; n++) {
            const float *s = from + n * depth + i;
            if (i % 16 == 0) {
                __builtin_prefetch(s + STATE_AHEAD);
            }
            by_k[n] = vf_fma(vf_load(s), k, by_k[n]);
            by_q[n] = vf_fma(vf_load(s), q, by_q[n]);
        }
    }
    vf_sum_four(sk, by_k[0], by_k[1], by_k[2], by_k[3]);
    vf_sum_four(sq, by_q[0], by_q[1], by_q[2], by_q[3]);
#pragma GCC unroll 4
    for (int32_t n = 0; n < rows; n++) {
        for (int64_t i = whole; i < depth; i++) {
            sk[n] += from[n * depth + i] * args->k[i];
            sq[n] += from[n * depth + i] * args->q[i];
        }
        r[n] = args->beta * (args->v[d + n] - args->decay * sk[n]);
        args->out[d + n] = args->decay * sq[n] + r[n] * args->kq;
        wide_r[n] = vf_set1(r[n]);
    }
    for (int64_t i = 0; i < whole; i += VF_WIDTH) {
        const vf k = vf_load(args->k + i);
#pragma GCC unroll 4
        for (int32_t n = 0; n < rows; n++) {
            const int64_t at = n * depth + i;
            vf_store(to + at, vf_fma(vf_load(from + at), decay, vf_mul(wide_r[n], k)));
        }
    }
    for (int32_t n = 0; n < rows; n++) {
        for (int64_t i = whole; i < depth; i++) {
            to[n * depth + i] = from[n * depth + i] * args->decay + r[n] * args->k[i];
        }
    }
}

static void delta_step(const struct delta_args *args)
{
    int32_t d = 0;
    for (; d + STEP_ROWS <= args->rows; d += STEP_ROWS) {
        delta_rows(args, d, STEP_ROWS);
    }
    for (; d < args->rows; d++) {
        delta_rows(args, d, 1);
    }
}

/* S' = S G; r = beta (v - S' k), or beta v; S = S' + r k^T; o = S' q + r (k q) + skip v. */
static void delta_rule(const struct delta_args *args)
{
    const int64_t depth = args->depth;
    for (int32_t d = 0; d < args->rows; d++) {
        const float *from = args->from + d * depth, v = args->v[d];
        float *to = args->to + d * depth;
        vf by_k = vf_set1(0.0f), by_q = vf_set1(0.0f);
        for (int64_t i = 0; i < depth; i += VF_WIDTH) {
            const vf s = vf_mul(vf_load(from + i), vf_load(args->decays + i));
            by_k = vf_fma(s, vf_load(args->k + i), by_k);
            by_q = vf_fma(s, vf_load(args->q + i), by_q);
            vf_store(to + i, s);
        }
        const float r = args->beta * (args->additive ? v : v - vf_sum(by_k));
        args->out[d] = vf_sum(by_q) + r * args->kq;
        if (args->changes != NULL) {
            args->changes[d] = r;
        }
        if (args->skip != 0) {
            args->out[d] += args->skip * v;
        }
        for (int64_t i = 0; i < depth; i += VF_WIDTH) {
            vf_store(to + i, vf_fma(vf_set1(r), vf_load(args->k + i), vf_load(to + i)));
        }
    }
}

/* to[j][i] = from[i][j] */
static void delta_transpose(float *to, int64_t to_stride, const float *from, int64_t from_stride,
                            int32_t rows, int32_t columns)
{
    for (int32_t i = 0; i < rows; i += VF_WIDTH) {
        for (int32_t j = 0; j < columns; j += VF_WIDTH) {
            vf block[VF_WIDTH];
#pragma GCC unroll 16
            for (int32_t n = 0; n < VF_WIDTH; n++) {
                block[n] = vf_load(from + (i + n) * from_stride + j);
            }
            vf_transpose(block);
#pragma GCC unroll 16
            for (int32_t n = 0; n < VF_WIDTH; n++) {
                vf_store(to + (j + n) * to_stride + i, block[n]);
            }
        }
    }
}

#ifdef __AVX512F__
#include "delta_walk.h"
#define WALK .walk = delta_walk, .group_products = delta_group_products
#else
#define WALK .walk = NULL
#endif

static const struct delta_kernels delta_operations = {.convolve = delta_convolve,
                                                      .decays = delta_decays,
                                                      .solve = delta_solve,
                                                      .dot = delta_dot,
                                                      .normalize = delta_normalize,
                                                      .gates = delta_gates,
                                                      .activate = delta_activate,
                                                      .multiply = delta_multiply,
                                                      .step = delta_step,
                                                      .rule = delta_rule,
                                                      .transpose = delta_transpose,
                                                      WALK};

#endif
