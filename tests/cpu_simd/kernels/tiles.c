/* SPDX-License-Identifier: Apache-2.0 */
/* Packed tiles of one compute type: conversion, packing with products, and the softmax between
 * them. */
#include "kernels_test.h"

enum { MOST_ROWS = 40, TIMES = 40 };

static struct {
    _Alignas(64) uint8_t rows[TILE_KEYS][4 * MAX_SIZE];
    _Alignas(64) uint8_t left[MOST_ROWS][4 * MAX_SIZE];
    _Alignas(64) uint8_t packed[TILE_KEYS * MAX_SIZE * 4];
    _Alignas(64) float out[MOST_ROWS][MAX_SIZE];
    _Alignas(64) float old[MOST_ROWS][MAX_SIZE];
    double a[MOST_ROWS][MAX_SIZE];
    double b[TILE_KEYS][MAX_SIZE];
    const void *pointers[TILE_KEYS];
} it;

void test_unpack(void **state)
{
    static const int32_t widths[] = {[ELEMENT_F32] = 4,  [ELEMENT_F16] = 2,  [ELEMENT_BF16] = 2,
                                     [ELEMENT_E4M3] = 1, [ELEMENT_E5M2] = 1, [ELEMENT_INT8] = 1};
    static uint8_t codes[4 << 16], out[(4 << 16) + 8], wanted[4];
    for (int32_t element = 0; element < ELEMENT_COUNT; element++) {
        int32_t n = widths[element] == 1 ? 256 : 65536, odd = (int32_t)draw(37);
        for (int32_t i = 0; i < n; i++) {
            float x = draw_number(3.0f);
            uint16_t code = (uint16_t)i;
            memcpy(codes + i * widths[element], element == ELEMENT_F32 ? (void *)&x : (void *)&code,
                   (size_t)widths[element]);
        }
        memset(out, 0xee, sizeof out);
        kernels->unpack[element](out, codes, n - odd); /* no multiple of a vector */
        for (int32_t i = 0; i < n - odd; i++) {
            float x;
            memcpy(&x, codes + 4 * i, sizeof x);
            double value = element == ELEMENT_F32 ? x : code_value(element, (uint32_t)i);
            double expected = isfinite(value) ? put_element(wanted, 0, (float)value) : value;
            check_near(element_at(out, i), expected, 0, "unpack", element, i);
        }
        for (int32_t i = 0; i < 8; i++) {
            assert_int_equal(out[(n - odd) * kernels->element_bytes + i], 0xee);
        }
    }
    BENCH("unpack f16, 128", kernels->unpack[ELEMENT_F16](out, codes, 128))
}

static void fill_left(int32_t m, int32_t k, float size)
{
    for (int32_t i = 0; i < m; i++) {
        for (int32_t d = 0; d < k; d++) {
            it.a[i][d] = put_element(it.left[i], d, draw_number(size));
        }
    }
}

static void fill_rows(int32_t n, int32_t columns)
{
    for (int32_t j = 0; j < TILE_KEYS; j++) {
        it.pointers[j] = it.rows[j];
        for (int32_t d = 0; d < columns; d++) {
            it.b[j][d] = put_element(it.rows[j], d, j < n ? draw_number(1.0f) : 1e30f);
            it.b[j][d] = j < n ? it.b[j][d] : 0.0;
        }
    }
}

/* out[i][j] against old + sum over k of a[i][p] b(p, j); the error of k float32 additions. */
static void check_product(int32_t m, int32_t n, int32_t k, bool by_key, bool accumulate,
                          const char *what)
{
    for (int32_t i = 0; i < m; i++) {
        for (int32_t j = 0; j < n; j++) {
            double sum = accumulate ? it.old[i][j] : 0, size = fabs(sum);
            for (int32_t p = 0; p < k; p++) {
                double term = it.a[i][p] * (by_key ? it.b[j][p] : it.b[p][j]);
                sum += term;
                size += fabs(term);
            }
            check_near(it.out[i][j], sum, (k + 2) * 0x1p-24 * size, what, i, j);
        }
    }
}

static void fill_out(void)
{
    for (int32_t i = 0; i < MOST_ROWS; i++) {
        for (int32_t j = 0; j < MAX_SIZE; j++) {
            it.out[i][j] = it.old[i][j] = draw_number(4.0f);
        }
    }
}

static void check_untouched(int32_t m, int32_t n)
{
    for (int32_t i = 0; i < MOST_ROWS; i++) {
        for (int32_t j = i < m ? n : 0; j < MAX_SIZE; j++) {
            check_near(it.out[i][j], it.old[i][j], 0, "outside of the product", i, j);
        }
    }
}

/* A row's sums are the same bits with and without other rows. */
static void check_alone(int32_t m, int32_t n, int32_t k, int64_t ldb, bool accumulate)
{
    static _Alignas(64) float alone[MAX_SIZE];
    int64_t lda = (int64_t)sizeof it.left[0] / kernels->element_bytes;
    int32_t i = (int32_t)draw((uint32_t)m);
    memcpy(alone, it.old[i], sizeof alone);
    kernels->gemm(alone, MAX_SIZE, it.left[i], lda, it.packed, ldb, 1, n, k, accumulate);
    assert_memory_equal(alone, it.out[i], (size_t)n * sizeof(float));
}

void test_scores_gemm(void **state)
{
    for (int32_t time = 0; time < TIMES; time++) {
        int32_t m = 1 + (int32_t)draw(MOST_ROWS), depth = 32 * (1 + (int32_t)draw(MAX_SIZE / 32));
        int32_t columns = 32 * (1 + (int32_t)draw(TILE_KEYS / 32));
        int32_t n = columns - (int32_t)draw(32);
        int64_t lda = (int64_t)sizeof it.left[0] / kernels->element_bytes;
        fill_left(m, depth, 1.0f);
        fill_rows(n, depth);
        fill_out();
        bool accumulate = draw(2);
        kernels->pack_keys(it.packed, it.pointers, n, columns, depth);
        kernels->gemm(it.out[0], MAX_SIZE, it.left, lda, it.packed, TILE_KEYS, m, columns, depth,
                      accumulate);
        check_product(m, columns, depth, true, accumulate, "scores");
        check_alone(m, columns, depth, TILE_KEYS, accumulate);
        check_untouched(m, columns);
    }
    int64_t lda = (int64_t)sizeof it.left[0] / kernels->element_bytes;
    BENCH("pack_keys 128 x 128", kernels->pack_keys(it.packed, it.pointers, 128, 128, 128))
    BENCH("gemm 24 x 128 x 128",
          kernels->gemm(it.out[0], MAX_SIZE, it.left, lda, it.packed, TILE_KEYS, 24, 128, 128, 0))
}

void test_values_gemm(void **state)
{
    for (int32_t time = 0; time < TIMES; time++) {
        int32_t m = 1 + (int32_t)draw(MOST_ROWS), width = 32 * (1 + (int32_t)draw(MAX_SIZE / 32));
        int32_t keys = 32 * (1 + (int32_t)draw(TILE_KEYS / 32)), n = keys - (int32_t)draw(32);
        int64_t lda = (int64_t)sizeof it.left[0] / kernels->element_bytes;
        fill_left(m, keys, 1.0f);
        fill_rows(n, width);
        fill_out();
        bool accumulate = draw(2);
        assert_int_equal(kernels->pack_values(it.packed, it.pointers, n, keys, width), 0);
        kernels->gemm(it.out[0], MAX_SIZE, it.left, lda, it.packed, width, m, width, keys,
                      accumulate);
        check_product(m, width, keys, false, accumulate, "values");
        check_alone(m, width, keys, width, accumulate);
        check_untouched(m, width);
        int32_t bad = (int32_t)draw((uint32_t)n), at = (int32_t)draw((uint32_t)width);
        uint32_t inf = kernels->element == ELEMENT_F32 ? 0x7f800000u : 0x7f80u;
        inf |= draw(2); /* or NaN */
        memcpy(it.rows[bad] + at * kernels->element_bytes, &inf, (size_t)kernels->element_bytes);
        assert_int_equal(kernels->pack_values(it.packed, it.pointers, n, keys, width), 1);
    }
    fill_rows(128, 128);
    BENCH("pack_values 128 x 128", kernels->pack_values(it.packed, it.pointers, 128, 128, 128))
}

/* One call on random columns of a tile, its state as an earlier call left it. */
static void softmax_once(int32_t rows, bool first, bool scaled, float growth)
{
    static _Alignas(64) float scores[MOST_ROWS * SCORE_STRIDE], given[MOST_ROWS * SCORE_STRIDE];
    static float row_max[MOST_ROWS], sum[MOST_ROWS], scores_scale[MOST_ROWS], scale[TILE_KEYS];
    static int32_t low[MOST_ROWS], high[MOST_ROWS];
    int32_t begin = 32 * (int32_t)draw(3), end = begin + 32 * (1 + (int32_t)draw(2));
    bool whole = draw(3) == 0;
    struct softmax_args args = {
        scores,  rows, whole ? 0 : begin, whole ? TILE_KEYS : end, low, high, 1.44f,
        row_max, sum,  scores_scale,      scaled ? scale : NULL};
    double before_sum[MOST_ROWS], before[MOST_ROWS];
    /* those of AVX512_BF16 let a probability grow to 2^16, all others to 2^8 */
    const bool grows = kernels == variant->bf16 && (strcmp(variant->name, "avx512bf16") == 0 ||
                                                    strcmp(variant->name, "amx") == 0);
    const double most = grows ? 0x1.1p16 : 300;
    for (int32_t r = 0; r < rows; r++) {
        low[r] = draw(2) ? -5 : (int32_t)draw(TILE_KEYS);
        high[r] = draw(2) ? TILE_KEYS + 5 : low[r] + (int32_t)draw(TILE_KEYS);
        row_max[r] = first ? -INFINITY : row_max[r];
        sum[r] = first ? 0.0f : sum[r];
        before[r] = row_max[r];
        before_sum[r] = sum[r];
        for (int32_t j = 0; j < TILE_KEYS; j++) {
            float x = draw_number(growth);
            scale[j] = 0.5f + (float)draw(4);
            scores[r * SCORE_STRIDE + j] = j < args.begin || j >= args.end ? NAN : x;
            if (j >= args.begin && j < args.end && (j < low[r] || j >= high[r])) {
                scores[r * SCORE_STRIDE + j] = draw(2) ? NAN : 1e30f; /* never looked at */
            }
            given[r * SCORE_STRIDE + j] = scores[r * SCORE_STRIDE + j];
        }
    }
    kernels->softmax(&args);
    for (int32_t r = 0; r < rows; r++) {
        const void *out = scores + r * SCORE_STRIDE;
        double at = row_max[r] == -INFINITY ? 0 : row_max[r], total = 0;
        double kept = before[r] == -INFINITY ? 1 : exp2(before[r] - at);
        /* the difference of the references is rounded once */
        check_near(scores_scale[r], kept, (1 + fabs(log2(kept))) * 0x1p-23 * kept, "rescale", r, 0);
        for (int32_t j = args.begin; j < args.end; j++) {
            bool sees = j >= low[r] && j < high[r];
            double p = sees ? exp2((double)given[r * SCORE_STRIDE + j] * 1.44f - at) : 0;
            double wanted = p * (scaled ? scale[j] : 1);
            double bound = (2 * element_step() + 4e-6) * wanted;
            check_near(element_at(out, j), wanted, bound, "probability", r, j);
            total += p;
            assert_true(p < most); /* the reference follows the maximum */
        }
        total += before_sum[r] * kept;
        /* the sum is that of probabilities before they are rounded */
        double exponential = kernels->element_bytes == 2 ? 1e-4 : 2e-5;
        check_near(sum[r], total, exponential * total, "sum", r, 0);
    }
}

void test_softmax(void **state)
{
    for (int32_t time = 0; time < 4 * TIMES; time++) {
        int32_t rows = 1 + (int32_t)draw(ROW_BLOCK_MAX);
        bool scaled = draw(2);
        softmax_once(rows, true, scaled, 4.0f);
        softmax_once(rows, false, scaled, 4.0f);
        softmax_once(rows, false, scaled, 30.0f); /* references are raised */
    }
}
