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
        for (size_t i = 0; i < num_test_cases; i++) {
            static const int32_t dtypes[] = {F32, F16, BF16};
            for (int d = 0; d < 3; d++) {
                struct test_case test = test_cases[i];
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
