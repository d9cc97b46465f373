/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_simd against cpu_ref: every variant of this machine, every term, per element.
 * usage: test_cpu_simd attn_cpu_ref.so attn_cpu_simd.so [seed [case]] */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "kernels.h"

static const char *reference_file;
static const char *simd_file;
static uint64_t seed = 20261120;
static const char *only_case;

#define F32 ATTN_DTYPE_F32
#define F16 ATTN_DTYPE_F16
#define BF16 ATTN_DTYPE_BF16
#define HND ATTN_KV_LAYOUT_HND
#define SHAPE(hq, hk, d) .q_heads = hq, .kv_heads = hk, .depth = d
#define BATCH(r, q0, q1, c0, c1) .num_reqs = r, .queries = {q0, q1}, .context = {c0, c1}

static const struct test_case cases[] = {
    {.name = "decode-nhd", SHAPE(8, 2, 128), BATCH(5, 1, 1, 0, 400), .block_size = 16},
    {.name = "decode-hnd",
     SHAPE(8, 2, 128),
     BATCH(5, 1, 1, 0, 700),
     .block_size = 32,
     .layout = HND},
    {.name = "decode-group-1", SHAPE(3, 3, 64), BATCH(4, 1, 1, 0, 300), .block_size = 16},
    {.name = "decode-group-7",
     SHAPE(7, 1, 128),
     BATCH(4, 1, 1, 0, 300),
     .block_size = 7,
     .layout = HND},
    {.name = "decode-group-16", SHAPE(16, 1, 64), BATCH(3, 1, 1, 0, 300), .block_size = 16},
    {.name = "decode-split",
     SHAPE(4, 1, 128),
     BATCH(1, 1, 1, 4000, 4100),
     .block_size = 16,
     .layout = HND},
    {.name = "decode-split-nhd", SHAPE(4, 2, 64), BATCH(2, 1, 1, 2900, 3100), .block_size = 16},
    {.name = "decode-split-sinks",
     SHAPE(4, 1, 128),
     BATCH(1, 1, 1, 2900, 3100),
     .block_size = 16,
     .sinks = 1},
    {.name = "decode-window",
     SHAPE(8, 2, 128),
     BATCH(4, 1, 1, 200, 500),
     .block_size = 16,
     .window = 77},
    {.name = "decode-all-terms",
     SHAPE(8, 2, 64),
     BATCH(4, 1, 1, 100, 500),
     .block_size = 16,
     .window = 300,
     .soft_cap = 20,
     .alibi = ATTN_ALIBI_LINEAR,
     .sinks = 1},
    {.name = "decode-head-80", SHAPE(8, 2, 80), BATCH(4, 1, 1, 0, 300), .block_size = 16},
    {.name = "decode-72-40",
     SHAPE(4, 2, 72),
     .width = 40,
     BATCH(4, 1, 1, 0, 200),
     .block_size = 16},
    {.name = "decode-packed",
     SHAPE(8, 2, 64),
     BATCH(4, 1, 1, 0, 300),
     .block_size = 16,
     .layout = HND,
     .pack = 8},
    {.name = "decode-table-rows",
     SHAPE(8, 2, 64),
     BATCH(4, 1, 1, 0, 300),
     .block_size = 16,
     .table_rows = 1,
     .first_row = 3},
    {.name = "verify-4", SHAPE(8, 2, 128), BATCH(4, 4, 4, 0, 300), .block_size = 16},
    {.name = "prefill", SHAPE(8, 2, 128), BATCH(2, 100, 260, 0, 0), .block_size = 16},
    {.name = "prefill-hnd",
     SHAPE(4, 1, 128),
     BATCH(2, 100, 260, 0, 0),
     .block_size = 64,
     .layout = HND},
    {.name = "extend", SHAPE(4, 1, 64), BATCH(4, 1, 90, 0, 300), .block_size = 16},
    {.name = "mixed-idle", SHAPE(4, 2, 64), BATCH(7, 1, 60, 0, 200), .block_size = 16, .idle = 1},
    {.name = "head-24", SHAPE(2, 2, 24), BATCH(3, 20, 60, 0, 100), .block_size = 16},
    {.name = "head-256", SHAPE(4, 2, 256), BATCH(2, 20, 60, 0, 100), .block_size = 16},
    {.name = "head-512", SHAPE(2, 1, 512), BATCH(2, 1, 30, 0, 150), .block_size = 16},
    {.name = "head-192-128",
     SHAPE(4, 4, 192),
     .width = 128,
     BATCH(2, 20, 60, 0, 100),
     .block_size = 16},
    {.name = "encoder", SHAPE(4, 4, 64), BATCH(3, 30, 150, 0, 0), .not_causal = 1},
    {.name = "encoder-72", SHAPE(4, 2, 72), BATCH(3, 30, 90, 0, 0), .not_causal = 1},
    {.name = "contiguous-causal", SHAPE(4, 2, 64), BATCH(3, 30, 150, 0, 0), .first_row = 2},
    {.name = "contiguous-longer", SHAPE(4, 2, 64), BATCH(3, 1, 80, 0, 90), .longer_keys = 1},
    {.name = "cross", SHAPE(4, 4, 64), BATCH(3, 1, 40, 10, 300), .block_size = 16, .not_causal = 1},
    {.name = "window", SHAPE(4, 2, 64), BATCH(3, 30, 150, 0, 200), .block_size = 16, .window = 50},
    {.name = "symmetric",
     SHAPE(4, 2, 64),
     BATCH(3, 30, 150, 0, 0),
     .not_causal = 1,
     .symmetric = 40},
    {.name = "chunked", SHAPE(4, 2, 64), BATCH(3, 30, 150, 0, 200), .block_size = 16, .chunk = 64},
    {.name = "chunked-lookback",
     SHAPE(4, 2, 64),
     BATCH(3, 30, 150, 0, 200),
     .block_size = 16,
     .chunk = 48,
     .lookback = 1},
    {.name = "soft-cap",
     SHAPE(4, 2, 64),
     BATCH(3, 30, 90, 0, 200),
     .block_size = 16,
     .soft_cap = 15},
    {.name = "alibi",
     SHAPE(4, 2, 64),
     BATCH(3, 30, 90, 0, 200),
     .block_size = 16,
     .alibi = ATTN_ALIBI_LINEAR},
    {.name = "alibi-encoder",
     SHAPE(4, 2, 64),
     BATCH(3, 30, 90, 0, 0),
     .not_causal = 1,
     .alibi = ATTN_ALIBI_LINEAR},
    {.name = "alibi-sqrt",
     SHAPE(4, 2, 64),
     BATCH(3, 30, 90, 0, 200),
     .block_size = 16,
     .alibi = ATTN_ALIBI_SQRT,
     .not_causal = 1},
    {.name = "sinks", SHAPE(4, 2, 64), BATCH(3, 30, 90, 0, 200), .block_size = 16, .sinks = 1},
    {.name = "spans", SHAPE(4, 2, 64), BATCH(3, 60, 190, 0, 50), .block_size = 16, .spans = 1},
    {.name = "spans-window",
     SHAPE(4, 2, 64),
     BATCH(3, 60, 190, 0, 50),
     .block_size = 16,
     .spans = 1,
     .window = 40,
     .span_window = 60},
    {.name = "tree-bits",
     SHAPE(4, 2, 64),
     BATCH(3, 3, 40, 0, 300),
     .block_size = 16,
     .tree = ATTN_TREE_BITS},
    {.name = "tree-one",
     SHAPE(4, 2, 64),
     BATCH(3, 1, 1, 0, 300),
     .block_size = 16,
     .tree = ATTN_TREE_BIAS},
    {.name = "tree-bias-open",
     SHAPE(4, 2, 64),
     BATCH(3, 3, 40, 0, 300),
     .block_size = 16,
     .tree = ATTN_TREE_BIAS,
     .not_causal = 1,
     .soft_cap = 30},
    {.name = "causal-per-request",
     SHAPE(4, 2, 64),
     BATCH(4, 3, 90, 0, 100),
     .block_size = 16,
     .per_request_causal = 1},
    {.name = "nan-decode", SHAPE(4, 2, 64), BATCH(3, 1, 1, 0, 100), .block_size = 16, .nan_key = 1},
    {.name = "nan-prefill",
     SHAPE(4, 2, 64),
     BATCH(3, 5, 90, 0, 100),
     .block_size = 16,
     .nan_key = 1},
    {.name = "nan-tree",
     SHAPE(4, 2, 64),
     BATCH(3, 5, 40, 0, 100),
     .block_size = 16,
     .nan_key = 1,
     .tree = ATTN_TREE_BITS,
     .not_causal = 1},
    {.name = "e4m3-decode",
     SHAPE(8, 2, 128),
     BATCH(4, 1, 1, 0, 400),
     .block_size = 16,
     .layout = HND,
     .kv_dtype = ATTN_KV_FP8_E4M3,
     .scale_form = ATTN_SCALE_PER_TENSOR},
    {.name = "e4m3-heads",
     SHAPE(8, 2, 128),
     BATCH(4, 1, 60, 0, 200),
     .block_size = 16,
     .kv_dtype = ATTN_KV_FP8_E4M3,
     .scale_form = ATTN_SCALE_PER_HEAD},
    {.name = "e5m2-decode",
     SHAPE(4, 2, 72),
     BATCH(4, 1, 1, 0, 400),
     .block_size = 16,
     .kv_dtype = ATTN_KV_FP8_E5M2,
     .scale_form = ATTN_SCALE_PER_HEAD},
    {.name = "e5m2-extend",
     SHAPE(4, 2, 64),
     BATCH(4, 1, 60, 0, 200),
     .block_size = 16,
     .kv_dtype = ATTN_KV_FP8_E5M2,
     .scale_form = ATTN_SCALE_PER_TENSOR,
     .soft_cap = 30},
    {.name = "int8-kv-decode",
     SHAPE(8, 2, 128),
     BATCH(4, 1, 1, 0, 700),
     .block_size = 16,
     .layout = HND,
     .kv_dtype = ATTN_KV_INT8_KV},
    {.name = "int8-kv-extend",
     SHAPE(6, 2, 72),
     .width = 40,
     BATCH(4, 1, 60, 0, 200),
     .block_size = 16,
     .kv_dtype = ATTN_KV_INT8_KV,
     .alibi = ATTN_ALIBI_LINEAR},
    {.name = "int8-kv-empty",
     SHAPE(4, 2, 64),
     BATCH(6, 1, 9, 0, 40),
     .block_size = 16,
     .kv_dtype = ATTN_KV_INT8_KV,
     .not_causal = 1,
     .idle = 1,
     .nan_key = 1},
    {.name = "int8-k-decode",
     SHAPE(8, 2, 128),
     BATCH(4, 1, 1, 0, 700),
     .block_size = 16,
     .layout = HND,
     .kv_dtype = ATTN_KV_INT8_K},
    {.name = "int8-k-extend",
     SHAPE(4, 2, 64),
     BATCH(4, 1, 60, 0, 200),
     .block_size = 16,
     .pack = 8,
     .kv_dtype = ATTN_KV_INT8_K,
     .window = 50},
    {.name = "int8-rows-decode",
     SHAPE(8, 2, 128),
     BATCH(4, 1, 1, 0, 700),
     .block_size = 16,
     .layout = HND,
     .kv_dtype = ATTN_KV_INT8_PER_TOKEN_HEAD,
     .least_code = 1},
    {.name = "int8-rows-wide",
     SHAPE(8, 1, 192),
     .width = 64,
     BATCH(4, 1, 1, 0, 700),
     .block_size = 16,
     .kv_dtype = ATTN_KV_INT8_PER_TOKEN_HEAD,
     .least_code = 1},
    {.name = "int8-rows-one",
     SHAPE(2, 2, 64),
     BATCH(4, 1, 1, 0, 700),
     .block_size = 16,
     .kv_dtype = ATTN_KV_INT8_PER_TOKEN_HEAD},
    {.name = "int8-rows-extend",
     SHAPE(4, 2, 64),
     BATCH(4, 1, 60, 0, 200),
     .block_size = 16,
     .kv_dtype = ATTN_KV_INT8_PER_TOKEN_HEAD,
     .nan_key = 1},
    {.name = "int4-decode",
     SHAPE(8, 2, 128),
     BATCH(4, 1, 1, 0, 700),
     .block_size = 16,
     .layout = HND,
     .kv_dtype = ATTN_KV_INT4_PER_TOKEN_HEAD},
    {.name = "int4-wide",
     SHAPE(6, 1, 256),
     .width = 64,
     BATCH(4, 1, 1, 0, 300),
     .block_size = 16,
     .kv_dtype = ATTN_KV_INT4_PER_TOKEN_HEAD},
    {.name = "int4-extend",
     SHAPE(6, 2, 64),
     .width = 32,
     BATCH(4, 1, 60, 0, 200),
     .block_size = 16,
     .kv_dtype = ATTN_KV_INT4_PER_TOKEN_HEAD,
     .sinks = 1,
     .window = 50},
    {.name = "int4-packed",
     SHAPE(4, 2, 16),
     .width = 8,
     BATCH(4, 1, 60, 0, 200),
     .block_size = 16,
     .pack = 8,
     .kv_dtype = ATTN_KV_INT4_PER_TOKEN_HEAD,
     .nan_key = 1},
    {.name = "int4-bytes",
     SHAPE(2, 2, 256),
     BATCH(3, 1, 1, 0, 60),
     .block_size = 16,
     .pack = 1,
     .kv_dtype = ATTN_KV_INT4_PER_TOKEN_HEAD,
     .soft_cap = 30},
    {.name = "int4-empty",
     SHAPE(4, 2, 64),
     BATCH(6, 1, 9, 0, 40),
     .block_size = 16,
     .kv_dtype = ATTN_KV_INT4_PER_TOKEN_HEAD,
     .not_causal = 1,
     .idle = 1},
    {.name = "f32-cache",
     SHAPE(4, 2, 64),
     BATCH(3, 1, 30, 0, 100),
     .block_size = 16,
     .kv_dtype = ATTN_KV_F32},
    {.name = "bf16-cache",
     SHAPE(4, 2, 64),
     BATCH(3, 1, 1, 0, 100),
     .block_size = 16,
     .kv_dtype = ATTN_KV_BF16},
    {.name = "invariant",
     SHAPE(4, 2, 64),
     BATCH(5, 1, 60, 0, 400),
     .block_size = 16,
     .batch_invariant = 1},
};

/* Errors are relative to the RMS of the reference row, after one unit in the last place of the
 * output's dtype, since two sums may round to neighbours. In bf16 the probabilities are rounded. */
static float bound_of(const struct test_case *test)
{
    if (test->bound > 0) {
        return test->bound;
    }
    return test->dtype == F32 ? 4e-5f : test->dtype == F16 ? 5e-5f : 1.2e-2f;
}

static bool same_special(float a, float b)
{
    return (isnan(a) && isnan(b)) || (isinf(a) && a == b);
}

/* Largest error of one row in units of its RMS; infinite where NaN or infinity differ. */
static float row_error(const struct attn_tensor *want, const struct attn_tensor *got, int64_t at,
                       int64_t n)
{
    double square = 0;
    float worst = 0;
    for (int64_t d = 0; d < n; d++) {
        float x = element_value(want, at + d);
        square += isfinite(x) ? (double)x * x : 0;
    }
    float rms = (float)sqrt(square / (double)n);
    for (int64_t d = 0; d < n; d++) {
        float x = element_value(want, at + d);
        float y = element_value(got, at + d);
        if (same_special(x, y) || x == y) {
            continue;
        }
        float unit = want->dtype.bits == 32                ? 0x1p-23f
                     : want->dtype.code == ATTN_CODE_FLOAT ? 0x1p-10f
                                                           : 0x1p-7f;
        float error = (fabsf(x - y) - unit * fabsf(x)) / (rms > 0 ? rms : 1);
        worst = error > worst ? error : isnan(error) ? INFINITY : worst;
    }
    return worst;
}

static void compare(struct test_data *data, const struct backend *backend, const void *want,
                    const float *want_lse, const void *got, const float *got_lse, float *worst)
{
    const struct test_case *test = data->test;
    struct attn_tensor a = data->out;
    struct attn_tensor b = data->out;
    a.data = (void *)(uintptr_t)want;
    b.data = (void *)(uintptr_t)got;
    float bound = bound_of(test);
    int64_t bytes = dtype_bytes(test->dtype);
    for (int64_t t = 0; t < data->rows_allocated; t++) {
        bool outside = t < test->first_row || t >= data->num_rows;
        int64_t row = t * data->out_strides[0];
        if (outside) {
            assert_memory_equal((const char *)want + row * bytes, (const char *)got + row * bytes,
                                (size_t)(data->out_strides[0] * bytes));
        }
        for (int64_t h = 0; h < test->q_heads && !outside; h++) {
            float error =
                row_error(&a, &b, row + h * data->out_strides[1], data->layer.head_size_v);
            float x = want_lse[t * test->q_heads + h];
            float y = got_lse[t * test->q_heads + h];
            float lse_error = same_special(x, y) ? 0 : fabsf(x - y) / (1 + fabsf(x));
            *worst = error > *worst ? error : *worst;
            if (!(error <= bound) || !(lse_error <= bound)) {
                fail_msg("%s dtype %d on %s: row %lld head %lld: error %g of the row's RMS (bound "
                         "%g), lse %g instead of %g; seed %llu",
                         test->name, test->dtype, backend->variant, (long long)t, (long long)h,
                         (double)error, (double)bound, (double)y, (double)x,
                         (unsigned long long)seed);
            }
        }
    }
}

static void check_case(const struct test_case *test, const struct backend *reference,
                       const struct backend *simd, float *worst)
{
    struct test_data data;
    struct attn_error error = ATTN_ERROR_INIT;
    void *want, *got;
    float *want_lse, *got_lse;
    random_seed(seed);
    data_make(&data, test, reference);
    if (run_attend(reference, &data, &want, &want_lse, &error) != ATTN_OK ||
        run_attend(simd, &data, &got, &got_lse, &error) != ATTN_OK) {
        fail_msg("%s on %s: %s: %s", test->name, simd->variant, error.field, error.message);
    }
    compare(&data, simd, want, want_lse, got, got_lse, worst);
    free(want);
    free(got);
    free(want_lse);
    free(got_lse);
    data_free(&data);
}

static void test_attend(void **state)
{
    char variants[MAX_VARIANTS][64];
    struct backend reference;
    int count = list_variants(simd_file, variants);
    (void)state;
    assert_true(count > 0);
    assert_true(backend_open(reference_file, "cpu_ref", "", &reference));
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int v = 0; v < count; v++) {
        struct backend simd;
        float worst[3] = {0};
        assert_true(backend_open(simd_file, "cpu_simd", variants[v], &simd));
        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
            static const int32_t dtypes[] = {F32, F16, BF16};
            for (int d = 0; d < 3; d++) {
                struct test_case test = cases[i];
                test.dtype = dtypes[d];
                if (test.dtype == F32 && test.kv_dtype == ATTN_KV_INT8_K) {
                    continue; /* its values have 16 bits */
                }
                if (only_case == NULL || strcmp(only_case, test.name) == 0) {
                    check_case(&test, &reference, &simd, &worst[d]);
                }
            }
        }
        print_message("%s: largest error f32 %.2g, f16 %.2g, bf16 %.2g of a row's RMS\n",
                      variants[v], (double)worst[0], (double)worst[1], (double)worst[2]);
        backend_close(&simd);
    }
    backend_close(&reference);
}

static void test_write_kv(void **state)
{
    struct backend reference, simd;
    (void)state;
    assert_true(backend_open(reference_file, "cpu_ref", "", &reference));
    assert_true(backend_open(simd_file, "cpu_simd", "scalar", &simd));
    random_seed(seed);
    check_writes(&reference, &simd);
    backend_close(&reference);
    backend_close(&simd);
}

static void test_kernels(void **state)
{
    char variants[MAX_VARIANTS][64];
    struct backend reference, simd;
    int count = list_variants(simd_file, variants);
    (void)state;
    assert_true(backend_open(reference_file, "cpu_ref", "", &reference));
    for (int v = 0; v < count; v++) {
        assert_true(backend_open(simd_file, "cpu_simd", variants[v], &simd));
        random_seed(seed);
        check_kernels(&reference, &simd);
        backend_close(&simd);
    }
    backend_close(&reference);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_write_kv),
        cmocka_unit_test(test_kernels),
        cmocka_unit_test(test_attend),
    };
    if (argc < 3) {
        fprintf(stderr, "usage: test_cpu_simd attn_cpu_ref.so attn_cpu_simd.so [seed [case]]\n");
        return 2;
    }
    reference_file = argv[1];
    simd_file = argv[2];
    seed = argc > 3 ? strtoull(argv[3], NULL, 10) : seed;
    only_case = argc > 4 ? argv[4] : NULL;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
