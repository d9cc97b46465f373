/* SPDX-License-Identifier: Apache-2.0 */
/* batched_gemm: strided operands, transposed weights, fp8 weights with scales, mxfp4 weights with
 * theirs along either dimension, few rows of long sums, many rows, and rows that all batches share.
 */
#include <stdio.h>

#include "common/names.h"
#include "support/number.h"
#include "cases/compare.h"
#include "kernels/kernels.h"
#include "cases/kernel_test.h"
#include "support/random.h"
#include "harness/watch.h"

enum { BATCH = 5, ROWS = 7, INNER = 72, COLUMNS = 40 };
enum { FEW_ROWS = 4, FEW_INNER = 584, FEW_COLUMNS = 132 };
enum { MANY_INNER = 328, MANY_COLUMNS = 264 }; /* of more rows */
/* of mxfp4: whole blocks along both */
enum { MX_INNER = 96, MX_COLUMNS = 64, MX_BLOCK = 32 };
enum { MX_NONE, MX_ALONG_K, MX_ALONG_N };

struct gemm_variant {
    int32_t dtype;
    int32_t w_dtype;
    int32_t w_scales; /* 0, 1 or BATCH */
    bool transposed;  /* w's columns are contiguous, not its rows */
    int32_t mx;       /* MX_*: w is mxfp4, whatever w_dtype says */
    int32_t rows;     /* 0: ROWS, with INNER and COLUMNS */
    bool shared;      /* all batches multiply the same rows of a */
};

struct gemm_case {
    struct gemm_variant v;
    size_t a, w, out, scale, block_scale;
};

static int64_t inner_of(const struct gemm_variant *v)
{
    return v->mx ? MX_INNER : v->rows > FEW_ROWS ? MANY_INNER : v->rows > 0 ? FEW_INNER : INNER;
}

static int64_t columns_of(const struct gemm_variant *v)
{
    return v->mx                ? MX_COLUMNS
           : v->rows > FEW_ROWS ? MANY_COLUMNS
           : v->rows > 0        ? FEW_COLUMNS
                                : COLUMNS;
}

static int64_t rows_of(const struct gemm_variant *v)
{
    return v->rows > 0 ? v->rows : ROWS;
}

/* a and out are views of [rows, batch, …], as heads lie in a step's tensors. */
static struct case_tensor by_heads(int64_t rows, int64_t width)
{
    return (struct case_tensor){.shape = {BATCH, rows, width},
                                .strides = {width, BATCH * width, 1}};
}

static attn_status call_gemm(struct backend *backend, uint8_t *base, const struct device *device,
                             void *stream, const void *context, struct attn_error *error)
{
    const struct gemm_case *c = context;
    int64_t inner = inner_of(&c->v), columns = columns_of(&c->v);
    int64_t scale_rows = c->v.mx == MX_ALONG_K ? inner / MX_BLOCK : inner;
    int64_t scale_columns = c->v.mx == MX_ALONG_N ? columns / MX_BLOCK : columns;
    int64_t count = rows_of(&c->v);
    struct case_tensor a = by_heads(count, inner), out = by_heads(count, columns);
    struct case_tensor w = case_rows(BATCH, inner, columns);
    struct case_tensor block_scale = case_rows(BATCH, scale_rows, scale_columns);
    if (c->v.shared) {
        a.strides[0] = 0;
        a.strides[1] = inner;
    }
    if (c->v.transposed) {
        w.strides[1] = block_scale.strides[1] = 1;
        w.strides[2] = inner;
        block_scale.strides[2] = scale_rows;
    }
    struct attn_batched_gemm_args args = {
        .struct_size = sizeof args,
        .instance = backend->instance,
        .stream = stream,
        .a = case_bind(&a, base + c->a, device, c->v.dtype, 3),
        .w = case_bind(&w, base + c->w, device, c->v.w_dtype, 3),
        .w_scale = c->v.w_scales > 0 ? (const float *)(base + c->scale) : NULL,
        .w_scale_count = c->v.w_scales,
        .out = case_bind(&out, base + c->out, device, c->v.dtype, 3),
    };
    if (c->v.mx) {
        args.w_block_scale =
            case_bind(&block_scale, base + c->block_scale, device, ATTN_DTYPE_INT8, 3);
        block_scale.tensor.dtype = (struct attn_dtype){ATTN_CODE_FLOAT8_E8M0FNU, 8, 1};
        w.tensor.dtype = (struct attn_dtype){ATTN_CODE_FLOAT4_E2M1FN, 4, 1};
    }
    struct watch watch;
    watch_begin(&watch);
    return watch_end(&watch, backend, backend->kernels.batched_gemm(&args, error), error);
}

/* Any code is an e2m1; powers of two around 1. */
static void fill_mxfp4(const struct gemm_case *c, uint8_t *image, uint64_t *seed)
{
    for (int32_t i = 0; i < BATCH * MX_INNER * MX_COLUMNS / 2; i++) {
        image[c->w + (size_t)i] = (uint8_t)random_below(seed, 256);
    }
    for (int32_t i = 0; i < BATCH * MX_INNER * MX_COLUMNS / MX_BLOCK; i++) {
        image[c->block_scale + (size_t)i] = (uint8_t)(123 + random_below(seed, 9));
    }
}

static enum trial_result run_gemm(struct trial *trial, const void *variant, uint64_t seed)
{
    struct gemm_case c = {.v = *(const struct gemm_variant *)variant};
    struct kernel_test test;
    size_t e = number_bytes(c.v.dtype);
    int32_t inner = (int32_t)inner_of(&c.v), columns = (int32_t)columns_of(&c.v);
    int32_t count = (int32_t)rows_of(&c.v);
    kernel_test_init(&test, trial);
    c.a = kernel_test_add(&test, "a", BATCH * (size_t)count * (size_t)inner * e, false);
    size_t w_bytes = (size_t)number_bytes(c.v.w_dtype);
    c.w = kernel_test_add(&test, "w", BATCH * (size_t)inner * (size_t)columns * w_bytes, false);
    c.out = kernel_test_add(&test, "out", BATCH * (size_t)count * (size_t)columns * e, true);
    c.scale = kernel_test_add(&test, "scale", BATCH * sizeof(float), false);
    c.block_scale =
        kernel_test_add(&test, "block_scale", BATCH * MX_INNER * MX_COLUMNS / MX_BLOCK, false);
    if (!test.image.failed) {
        number_fill_normal(test.image.bytes + c.a, 0, BATCH * count * inner, c.v.dtype, 1, &seed);
        number_fill_normal(test.image.bytes + c.w, 0, BATCH * inner * columns, c.v.w_dtype, 1,
                           &seed);
    }
    if (c.v.mx && !test.image.failed) {
        fill_mxfp4(&c, test.image.bytes, &seed);
    }
    for (int32_t i = 0; i < BATCH && !test.image.failed; i++) {
        ((float *)(test.image.bytes + c.scale))[i] = 0.3f + 0.4f * (float)i;
    }
    enum trial_result result = kernel_test_run(&test, call_gemm, &c);
    if (result == TRIAL_PASSED) { /* heads are the batch */
        result = kernel_test_compare(&test, "out", c.out, count, BATCH, columns, c.v.dtype,
                                     bound_of_dtype(c.v.dtype));
    }
    kernel_test_finish(&test);
    return result;
}

void gemm_cases(const struct kernel_sink *sink)
{
    static const int32_t scales[] = {0, 1, BATCH}, many[] = {5, 17, 64, 70, 130, 130};
    char name[96];
    for (int32_t dtype = ATTN_DTYPE_F16; dtype <= ATTN_DTYPE_F32; dtype++) {
        bool there =
            (sink->caps->dtypes >> dtype & 1) && (sink->caps->kernels & ATTN_KERNEL_BATCHED_GEMM);
        for (int32_t i = 0; i < 8 && there; i++) {
            bool fp8 = i >= 4;
            struct gemm_variant v = {dtype, fp8 ? ATTN_DTYPE_FP8_E4M3 : dtype,
                                     scales[fp8 ? 1 + i % 2 : i % 2 * 2], i / 2 % 2 != 0};
            snprintf(name, sizeof name, "batched_gemm.%s.%s.scales%d%s", dtype_name(dtype),
                     dtype_name(v.w_dtype), v.w_scales, v.transposed ? ".transposed" : "");
            sink->try(sink->user, name, run_gemm, &v);
        }
        for (int32_t i = 0; i < 4 && there; i++) {
            struct gemm_variant v = {dtype, dtype, scales[i / 2 * 2], i % 2 != 0,
                                     .rows = i == 1 || i == 2 ? 1 : 3};
            snprintf(name, sizeof name, "batched_gemm.%s.rows%d%s", dtype_name(dtype), v.rows,
                     v.transposed ? ".transposed" : "");
            sink->try(sink->user, name, run_gemm, &v);
        }
        for (size_t i = 0; i < sizeof many / sizeof *many && there; i++) {
            struct gemm_variant v = {dtype,      dtype,           scales[i % 3],
                                     i % 2 != 0, .rows = many[i], .shared = i > 3};
            snprintf(name, sizeof name, "batched_gemm.%s.rows%d%s%s", dtype_name(dtype), v.rows,
                     v.transposed ? ".transposed" : "", v.shared ? ".shared" : "");
            sink->try(sink->user, name, run_gemm, &v);
        }
        there = there && sink->caps->features & ATTN_FEATURE_MXFP4_WEIGHTS;
        for (int32_t i = 0; i < 4 && there; i++) {
            bool along_n = i / 2 != 0;
            struct gemm_variant v = {dtype, dtype, scales[i % 2], i % 2 != 0,
                                     along_n ? MX_ALONG_N : MX_ALONG_K};
            snprintf(name, sizeof name, "batched_gemm.%s.mxfp4.%s.scales%d%s", dtype_name(dtype),
                     along_n ? "n" : "k", v.w_scales, v.transposed ? ".transposed" : "");
            sink->try(sink->user, name, run_gemm, &v);
        }
    }
}
