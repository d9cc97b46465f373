/* SPDX-License-Identifier: Apache-2.0 */
/* quantize, amax, batched_gemm and copies, each against its formula. Usage: test_numeric FILE.so */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats.h"
#include "harness.h"
#include "support/test.h"

#define SEED 41
#define COUNT(array) ((int32_t)(sizeof(array) / sizeof *(array)))
#define F32_BOUND 1e-6

/* ---- quantize, amax */

#define QUANT_ROWS 5
#define QUANT_HEADS 4
#define QUANT_DIMS 64
#define QUANT_COLUMNS (QUANT_HEADS * QUANT_DIMS)

static void fill_quant(double x[QUANT_ROWS][QUANT_COLUMNS], float *memory)
{
    for (int32_t i = 0; i < QUANT_ROWS * QUANT_COLUMNS; i++) {
        double value = random_normal() * exp(random_normal());
        int32_t zero = i / QUANT_COLUMNS == 2 && i % QUANT_COLUMNS < 128; /* groups of zeros */
        memory[i] = zero ? 0 : (float)value;
        x[i / QUANT_COLUMNS][i % QUANT_COLUMNS] = memory[i];
    }
}

static double largest_of(const double *x, int32_t count)
{
    double largest = 0;
    for (int32_t i = 0; i < count; i++) {
        largest = fabs(x[i]) > largest ? fabs(x[i]) : largest;
    }
    return largest;
}

static void check_group(int32_t group, int32_t pow2, int32_t column_major)
{
    static float memory[QUANT_ROWS * QUANT_COLUMNS], scales[QUANT_ROWS * QUANT_COLUMNS / 64];
    static uint8_t out[QUANT_ROWS][QUANT_COLUMNS];
    static double x[QUANT_ROWS][QUANT_COLUMNS];
    struct test_tensor tx, to, ts;
    int64_t groups = QUANT_COLUMNS / group;
    const int64_t shape[] = {QUANT_ROWS, QUANT_HEADS, QUANT_DIMS};
    fill_quant(x, memory);
    struct attn_quantize_args args = {
        .struct_size = sizeof args,
        .instance = serial.instance,
        .form = group == 64 ? ATTN_OUTPUT_FP8_GROUP_64 : ATTN_OUTPUT_FP8_GROUP_128,
        .scale_pow2 = pow2,
        .scale_column_major = column_major,
        .x = tensor_set(&tx, memory, ATTN_DTYPE_F32, 3, shape, NULL),
        .out = tensor_set(&to, out, ATTN_DTYPE_FP8_E4M3, 3, shape, NULL),
        .block_scales = tensor_set(&ts, scales, ATTN_DTYPE_F32, 2,
                                   column_major ? (int64_t[]){groups, QUANT_ROWS}
                                                : (int64_t[]){QUANT_ROWS, groups},
                                   NULL)};
    assert_int_equal(serial.kernels->quantize(&args, NULL), ATTN_OK);
    for (int32_t t = 0; t < QUANT_ROWS; t++) {
        for (int32_t g = 0; g < groups; g++) {
            double scale = fmax(largest_of(&x[t][g * group], group), 1e-10) / 448;
            float got = scales[column_major ? g * QUANT_ROWS + t : t * groups + g];
            if (pow2) {
                double power = 1;
                for (; power < scale; power *= 2) {
                }
                for (; power / 2 >= scale; power /= 2) {
                }
                assert_true(got == power);
            }
            expect_near(got, pow2 ? got : scale, 1e-7 * scale, "group scale", g);
            for (int32_t i = 0; i < group; i++) {
                uint32_t want = format_encode(ATTN_DTYPE_FP8_E4M3, x[t][g * group + i] / got);
                assert_int_equal(out[t][g * group + i], want);
            }
        }
    }
}

static void test_quantize_groups(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 8; i++) {
        check_group(i & 1 ? 64 : 128, i >> 1 & 1, i >> 2);
    }
}

static void test_quantize_static(void **state)
{
    static const int32_t formats[] = {ATTN_DTYPE_FP8_E4M3, ATTN_DTYPE_FP8_E5M2,
                                      ATTN_DTYPE_FP8_E4M3FNUZ, ATTN_DTYPE_INT8};
    static float memory[QUANT_ROWS * QUANT_COLUMNS];
    static uint8_t out[QUANT_ROWS * QUANT_COLUMNS];
    static double x[QUANT_ROWS][QUANT_COLUMNS];
    const float scales[QUANT_HEADS] = {0.01f, 0.3f, 0.00001f, 0.05f}; /* one saturates */
    const int64_t shape[] = {QUANT_ROWS, QUANT_HEADS, QUANT_DIMS};
    (void)state;
    for (int32_t i = 0; i < 2 * COUNT(formats); i++) {
        struct test_tensor tx, to;
        int32_t format = formats[i / 2], per_head = i % 2;
        fill_quant(x, memory);
        struct attn_quantize_args args = {
            .struct_size = sizeof args,
            .instance = threaded.instance,
            .form = ATTN_OUTPUT_FP8_STATIC,
            .scale_form = per_head ? ATTN_SCALE_PER_HEAD : ATTN_SCALE_PER_TENSOR,
            .scale = scales,
            .x = tensor_set(&tx, memory, ATTN_DTYPE_F32, 3, shape, NULL),
            .out = tensor_set(&to, out, format, 3, shape, NULL)};
        assert_int_equal(threaded.kernels->quantize(&args, NULL), ATTN_OK);
        for (int32_t j = 0; j < QUANT_ROWS * QUANT_COLUMNS; j++) {
            int32_t column = j % QUANT_COLUMNS;
            double scale = scales[per_head ? column / QUANT_DIMS : 0];
            assert_int_equal(out[j], format_encode(format, x[j / QUANT_COLUMNS][column] / scale));
        }
    }
}

static void test_quantize_nvfp4(void **state)
{
    static float memory[QUANT_ROWS * QUANT_COLUMNS];
    static uint8_t out[QUANT_ROWS][QUANT_COLUMNS / 2], scales[QUANT_ROWS][QUANT_COLUMNS / 16];
    static double x[QUANT_ROWS][QUANT_COLUMNS];
    struct test_tensor tx, to, ts;
    const float global = 37.5f;
    (void)state;
    fill_quant(x, memory);
    struct attn_quantize_args args = {
        .struct_size = sizeof args,
        .instance = serial.instance,
        .form = ATTN_OUTPUT_NVFP4,
        .scale = &global,
        .x = tensor_set(&tx, memory, ATTN_DTYPE_F32, 3,
                        (int64_t[]){QUANT_ROWS, QUANT_HEADS, QUANT_DIMS}, NULL),
        .out = tensor_set(&to, out, ATTN_DTYPE_INT8, 2, (int64_t[]){QUANT_ROWS, QUANT_COLUMNS / 2},
                          NULL),
        .block_scales = tensor_set(&ts, scales, ATTN_DTYPE_FP8_E4M3, 2,
                                   (int64_t[]){QUANT_ROWS, QUANT_COLUMNS / 16}, NULL)};
    assert_int_equal(serial.kernels->quantize(&args, NULL), ATTN_OK);
    for (int32_t t = 0; t < QUANT_ROWS; t++) {
        for (int32_t c = 0; c < QUANT_COLUMNS; c++) {
            double largest = largest_of(&x[t][c / 16 * 16], 16);
            uint32_t code = format_encode(ATTN_DTYPE_FP8_E4M3, global * largest / 6);
            double scale = format_decode(ATTN_DTYPE_FP8_E4M3, code);
            uint32_t want = scale == 0 ? 0 : format_encode(FORMAT_E2M1, x[t][c] * global / scale);
            assert_int_equal(scales[t][c / 16], code);
            assert_int_equal(out[t][c / 2] >> (c % 2 * 4) & 15, want);
        }
    }
}

static void test_amax(void **state)
{
    static float memory[QUANT_ROWS * QUANT_COLUMNS];
    static double x[QUANT_ROWS][QUANT_COLUMNS];
    struct test_tensor tx;
    (void)state;
    fill_quant(x, memory);
    for (int32_t i = 0; i < 4; i++) {
        float out[QUANT_HEADS] = {1e3f, 1e-9f, 1e-9f, 1e-9f};
        struct attn_amax_args args = {
            .struct_size = sizeof args,
            .instance = serial.instance,
            .out = out,
            .per_head = i & 1,
            .accumulate = i >> 1,
            .x = tensor_set(&tx, memory, ATTN_DTYPE_F32, 3,
                            (int64_t[]){QUANT_ROWS, QUANT_HEADS, QUANT_DIMS}, NULL)};
        assert_int_equal(serial.kernels->amax(&args, NULL), ATTN_OK);
        for (int32_t h = 0; h < (i & 1 ? QUANT_HEADS : 1); h++) {
            double want = h == 0 && i >> 1 ? 1e3 : 0;
            for (int32_t t = 0; t < QUANT_ROWS; t++) {
                want = fmax(want, largest_of(&x[t][i & 1 ? h * QUANT_DIMS : 0],
                                             i & 1 ? QUANT_DIMS : QUANT_COLUMNS));
            }
            assert_true(out[h] == (float)want);
        }
    }
}

/* ---- batched_gemm, copies */

static void test_gemm(void **state)
{
    enum { B = 3, M = 19, K = 70, N = 131 };
    static float a[B * M * K], w[B * N * K], out[B * M * N];
    const float scales[B] = {0.5f, 2, 3};
    (void)state;
    for (int32_t i = 0; i < B * M * K; i++) {
        a[i] = (float)random_normal();
    }
    for (int32_t i = 0; i < B * N * K; i++) {
        w[i] = (float)random_normal();
    }
    for (int32_t form = 0; form < 6; form++) {
        struct test_tensor ta, tw, to;
        int32_t transposed = form & 1, count = form / 2 == 0 ? 0 : form / 2 == 1 ? 1 : B;
        struct attn_batched_gemm_args args = {
            .struct_size = sizeof args,
            .instance = threaded.instance,
            .w_scale = count ? scales : NULL,
            .w_scale_count = count,
            .a = tensor_set(&ta, a, ATTN_DTYPE_F32, 3, (int64_t[]){B, M, K}, NULL),
            .w = tensor_set(&tw, w, ATTN_DTYPE_F32, 3, (int64_t[]){B, K, N},
                            transposed ? (int64_t[]){N * K, 1, K} : NULL),
            /* [M, B, N] seen as [B, M, N] */
            .out = tensor_set(&to, out, ATTN_DTYPE_F32, 3, (int64_t[]){B, M, N},
                              (int64_t[]){N, B * N, 1})};
        assert_int_equal(threaded.kernels->batched_gemm(&args, NULL), ATTN_OK);
        for (int32_t i = 0; i < B * M * N; i++) {
            int32_t b = i / (M * N), m = i / N % M, n = i % N;
            double want = 0;
            for (int32_t k = 0; k < K; k++) {
                want += (double)a[(b * M + m) * K + k] *
                        w[transposed ? (b * N + n) * K + k : (b * K + k) * N + n];
            }
            want *= count == 0 ? 1 : scales[count > 1 ? b : 0];
            expect_near(out[(m * B + b) * N + n], want, F32_BOUND, "product", i);
        }
    }
}

/* e2m1 by its table and e8m0 by its power of two (OCP Microscaling Formats 1.0), with blocks along
 * K and along N, in rows and transposed. */
static void test_mxfp4_gemm(void **state)
{
    enum { B = 2, M = 19, K = 96, N = 160, BLOCK = 32 };
    static const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    static float a[B * M * K], out[B * M * N];
    static uint8_t w[B * K * N / 2], scales[B * K * N / BLOCK];
    const float factor = 0.25f;
    (void)state;
    for (int32_t i = 0; i < B * M * K; i++) {
        a[i] = (float)random_normal();
    }
    for (int32_t i = 0; i < B * K * N / 2; i++) {
        w[i] = (uint8_t)(i * 73 + i / 7 * 41);
    }
    for (int32_t i = 0; i < B * K * N / BLOCK; i++) {
        scales[i] = (uint8_t)(120 + i % 13);
    }
    for (int32_t form = 0; form < 8; form++) {
        struct test_tensor ta, tw, to, ts;
        int32_t transposed = form & 1, along_k = form & 2, one = form & 4;
        int64_t sk = along_k ? K / BLOCK : K, sn = along_k ? N : N / BLOCK;
        struct attn_batched_gemm_args args = {
            .struct_size = sizeof args,
            .instance = threaded.instance,
            .w_scale = one ? &factor : NULL,
            .w_scale_count = one ? 1 : 0,
            .a = tensor_set(&ta, a, ATTN_DTYPE_F32, 3, (int64_t[]){B, M, K}, NULL),
            .w = tensor_set(&tw, w, ATTN_DTYPE_INT8, 3, (int64_t[]){B, K, N},
                            transposed ? (int64_t[]){N * K, 1, K} : NULL),
            .w_block_scale = tensor_set(&ts, scales, ATTN_DTYPE_INT8, 3, (int64_t[]){B, sk, sn},
                                        transposed ? (int64_t[]){sn * sk, 1, sk} : NULL),
            .out = tensor_set(&to, out, ATTN_DTYPE_F32, 3, (int64_t[]){B, M, N}, NULL)};
        tw.tensor.dtype = (struct attn_dtype){ATTN_CODE_FLOAT4_E2M1FN, 4, 1};
        ts.tensor.dtype = (struct attn_dtype){ATTN_CODE_FLOAT8_E8M0FNU, 8, 1};
        assert_int_equal(threaded.kernels->batched_gemm(&args, NULL), ATTN_OK);
        for (int32_t i = 0; i < B * M * N; i++) {
            int32_t b = i / (M * N), m = i / N % M, n = i % N;
            double want = 0;
            for (int32_t k = 0; k < K; k++) {
                int64_t at = transposed ? (b * N + n) * K + k : (b * K + k) * N + n;
                int64_t block_k = along_k ? k / BLOCK : k, block_n = along_k ? n : n / BLOCK;
                int64_t scale = transposed ? (b * sn + block_n) * sk + block_k
                                           : (b * sk + block_k) * sn + block_n;
                int32_t code = w[at / 2] >> (at % 2 * 4) & 15;
                double value = (code & 8 ? -1 : 1) * values[code & 7];
                want += (double)a[(b * M + m) * K + k] * value * pow(2, scales[scale] - 127);
            }
            want *= one ? (double)factor : 1;
            expect_near(out[i], want, F32_BOUND, "product", i);
        }
    }
}

/* A block scale that says NaN. */
static void test_mxfp4_scales(void **state)
{
    enum { K = 32, N = 64 };
    static float a[K] = {1}, out[N];
    static uint8_t w[K * N / 2], scales[N] = {[3] = 255};
    struct test_tensor ta, tw, to, ts;
    const struct attn_batched_gemm_args args = {
        .struct_size = sizeof args,
        .instance = threaded.instance,
        .a = tensor_set(&ta, a, ATTN_DTYPE_F32, 3, (int64_t[]){1, 1, K}, NULL),
        .w = tensor_set(&tw, w, ATTN_DTYPE_INT8, 3, (int64_t[]){1, K, N}, NULL),
        .w_block_scale = tensor_set(&ts, scales, ATTN_DTYPE_INT8, 3, (int64_t[]){1, 1, N}, NULL),
        .out = tensor_set(&to, out, ATTN_DTYPE_F32, 3, (int64_t[]){1, 1, N}, NULL)};
    (void)state;
    tw.tensor.dtype = (struct attn_dtype){ATTN_CODE_FLOAT4_E2M1FN, 4, 1};
    assert_int_equal(threaded.kernels->batched_gemm(&args, NULL), ATTN_OK);
    assert_true(isnan(out[3]) && out[2] == 0 && out[4] == 0);
}

static void test_copies(void **state)
{
    uint8_t source[6][16], destination[8][12], bytes[16];
    const int64_t pairs[] = {5, 0, 0, 7, 2, 3};
    struct attn_block_copy copies[] = {{source, destination, 16, 12, 8},
                                       {source[0] + 8, destination[0] + 8, 16, 12, 4}};
    struct attn_copy_blocks_args args = {.struct_size = sizeof args,
                                         .instance = serial.instance,
                                         .kind = ATTN_COPY_DEVICE_TO_HOST,
                                         .num_copies = 2,
                                         .copies = copies,
                                         .pairs = pairs,
                                         .num_pairs = 3,
                                         .copy_bytes = sizeof *copies};
    const struct attn_copy_args copy = {.struct_size = sizeof copy,
                                        .instance = serial.instance,
                                        .destination = bytes,
                                        .source = source[1],
                                        .bytes = 16,
                                        .kind = ATTN_COPY_DEVICE_TO_DEVICE};
    const struct attn_fill_args fill = {.struct_size = sizeof fill,
                                        .instance = serial.instance,
                                        .destination = source,
                                        .row_bytes = 3,
                                        .stride = 16,
                                        .rows = 4,
                                        .value = 0xab};
    (void)state;
    for (int32_t i = 0; i < 96; i++) {
        source[i / 16][i % 16] = (uint8_t)(i + 1);
    }
    memset(destination, 0, sizeof destination);
    assert_int_equal(serial.kernels->copy_blocks(&args, NULL), ATTN_OK);
    for (int32_t b = 0; b < 8; b++) {
        int32_t from = b == 0 ? 5 : b == 7 ? 0 : b == 3 ? 2 : -1;
        for (int32_t i = 0; i < 12; i++) {
            assert_int_equal(destination[b][i], from < 0 ? 0 : from * 16 + i + 1);
        }
    }
    assert_int_equal(serial.kernels->copy(&copy, NULL), ATTN_OK);
    assert_memory_equal(bytes, source[1], 16);
    assert_int_equal(serial.kernels->fill(&fill, NULL), ATTN_OK);
    for (int32_t i = 0; i < 96; i++) {
        assert_int_equal(source[i / 16][i % 16], i / 16 < 4 && i % 16 < 3 ? 0xab : i + 1);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quantize_groups),
        cmocka_unit_test(test_quantize_static),
        cmocka_unit_test(test_quantize_nvfp4),
        cmocka_unit_test(test_amax),
        cmocka_unit_test(test_gemm),
        cmocka_unit_test(test_mxfp4_gemm),
        cmocka_unit_test(test_mxfp4_scales),
        cmocka_unit_test(test_copies),
    };
    return harness_main(argc, argv, SEED, tests, sizeof tests / sizeof *tests);
}
