/* SPDX-License-Identifier: Apache-2.0 */
/* quantize in every form, and amax. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/names.h"
#include "support/number.h"
#include "kernels/kernels.h"
#include "cases/kernel_test.h"
#include "support/random.h"
#include "harness/watch.h"

#define TOKENS 13
#define HEADS 5
#define DIMS 128
#define ELEMENTS (TOKENS * HEADS * DIMS)
#define SCALE_TOLERANCE 1e-6f

struct quantize_variant {
    int32_t form;
    int32_t dtype;
    int32_t out_dtype; /* FP8_STATIC: e4m3, or a query's */
    int32_t scale_form;
    bool pow2;
    bool column_major;
};

struct quantize_case {
    struct quantize_variant v;
    size_t x, out, scale, block_scales;
    int32_t part; /* a part of the rows, see first_row; -1: all of them */
};

#define PARTS 3

/* Part 0 is a row alone. */
static int32_t first_row(int32_t part)
{
    return part == 0 ? 0 : part == 1 ? 1 : part == 2 ? TOKENS / 2 : TOKENS;
}

static int32_t group_of(int32_t form)
{
    return form == ATTN_OUTPUT_FP8_GROUP_64 ? 64 : form == ATTN_OUTPUT_FP8_GROUP_128 ? 128 : 16;
}

/* [T, groups], or [groups, T] */
static struct case_tensor shape_scales(const struct quantize_variant *v)
{
    int64_t groups = HEADS * DIMS / group_of(v->form);
    struct case_tensor s = {.shape = {TOKENS, groups}, .strides = {groups, 1}};
    if (v->column_major) {
        s = (struct case_tensor){.shape = {groups, TOKENS}, .strides = {TOKENS, 1}};
    }
    return s;
}

static attn_status call_quantize(struct backend *backend, uint8_t *base,
                                 const struct device *device, void *stream, const void *context,
                                 struct attn_error *error)
{
    const struct quantize_case *c = context;
    bool nvfp4 = c->v.form == ATTN_OUTPUT_NVFP4;
    struct case_tensor x = case_rows(TOKENS, HEADS, DIMS), out = x, scales = shape_scales(&c->v);
    scales.tensor = (struct attn_tensor){.data = NULL};
    if (nvfp4) { /* bytes of pairs */
        out = case_rows(TOKENS, HEADS, DIMS / 2);
    }
    struct attn_quantize_args args = {
        .struct_size = sizeof args,
        .instance = backend->instance,
        .stream = stream,
        .form = c->v.form,
        .scale_form = c->v.scale_form,
        .scale_pow2 = c->v.pow2,
        .scale_column_major = c->v.column_major,
        .x = case_bind(&x, base + c->x, device, c->v.dtype, 3),
        .out = case_bind(&out, base + c->out, device, c->v.out_dtype, 3),
        .scale = (const float *)(base + c->scale),
    };
    if (c->v.form != ATTN_OUTPUT_FP8_STATIC) {
        args.block_scales = case_bind(&scales, base + c->block_scales, device,
                                      nvfp4 ? ATTN_DTYPE_FP8_E4M3 : ATTN_DTYPE_F32, 2);
    }
    if (nvfp4) {
        out.tensor.dtype = (struct attn_dtype){ATTN_CODE_UINT, 8, 1};
    }
    if (c->part >= 0) {
        const int64_t first = first_row(c->part), count = first_row(c->part + 1) - first;
        struct case_tensor *rows[] = {&x, &out, &scales};
        for (int32_t i = 0; i < 3; i++) {
            const int32_t dim = i == 2 && c->v.column_major;
            const int64_t bytes = first * rows[i]->strides[dim] * rows[i]->tensor.dtype.bits / 8;
            rows[i]->shape[dim] = count;
            rows[i]->tensor.data = (uint8_t *)rows[i]->tensor.data + bytes;
        }
    }
    struct watch watch;
    watch_begin(&watch);
    return watch_end(&watch, backend, backend->kernels.quantize(&args, error), error);
}

static enum trial_result verify_nvfp4(struct kernel_test *test, const struct quantize_case *c)
{
    const uint8_t *want = test->expected + c->out, *have = test->found + c->out;
    int32_t off = 0;
    if (!codes_agree(test->expected + c->block_scales, test->found + c->block_scales, ELEMENTS / 16,
                     false)) {
        return trial_say(test->trial, TRIAL_FAILED, "block scales differ from the reference's");
    }
    for (int32_t i = 0; i < ELEMENTS; i++) {
        int32_t a = want[i / 2] >> (i % 2 * 4) & 15, b = have[i / 2] >> (i % 2 * 4) & 15;
        int32_t apart = (a & 8 ? -(a & 7) : a) - (b & 8 ? -(b & 7) : b);
        if (apart < -1 || apart > 1) {
            return trial_say(test->trial, TRIAL_FAILED, "element %d has code %d, not %d", i, b, a);
        }
        off += apart != 0;
    }
    return off <= ELEMENTS / 100
               ? TRIAL_PASSED
               : trial_say(test->trial, TRIAL_FAILED, "%d of %d codes are off", off, ELEMENTS);
}

static enum trial_result verify_quantize(struct kernel_test *test, const struct quantize_case *c)
{
    if (c->v.form == ATTN_OUTPUT_NVFP4) {
        return verify_nvfp4(test, c);
    }
    if (c->v.form != ATTN_OUTPUT_FP8_STATIC) {
        const float *want = (const float *)(test->expected + c->block_scales);
        const float *have = (const float *)(test->found + c->block_scales);
        for (int32_t i = 0; i < ELEMENTS / group_of(c->v.form); i++) {
            if (!(fabsf(want[i] - have[i]) <= SCALE_TOLERANCE * want[i])) {
                return trial_say(test->trial, TRIAL_FAILED, "scale %d is %g, not %g", i, have[i],
                                 want[i]);
            }
        }
    }
    return codes_agree(test->expected + c->out, test->found + c->out, ELEMENTS,
                       c->v.out_dtype == ATTN_DTYPE_INT8)
               ? TRIAL_PASSED
               : trial_say(test->trial, TRIAL_FAILED, "codes differ from the reference's");
}

static enum trial_result run_quantize(struct trial *trial, const void *variant, uint64_t seed)
{
    struct quantize_case c = {.v = *(const struct quantize_variant *)variant, .part = -1};
    struct kernel_test test;
    kernel_test_init(&test, trial);
    c.x = kernel_test_add(&test, "x", ELEMENTS * number_bytes(c.v.dtype), false);
    c.out = kernel_test_add(&test, "out", c.v.form == ATTN_OUTPUT_NVFP4 ? ELEMENTS / 2 : ELEMENTS,
                            true);
    c.scale = kernel_test_add(&test, "scale", HEADS * sizeof(float), false);
    c.block_scales = kernel_test_add(&test, "block_scales", ELEMENTS / 16 * sizeof(float), true);
    for (int32_t i = 0; i < ELEMENTS && !test.image.failed; i++) {
        /* groups of very different size, one of zeros, and some that saturate */
        double size = ldexp(1, i / 64 % 17 - 8) * (i / 64 % 23 != 7);
        number_store(test.image.bytes + c.x, i, c.v.dtype, size * random_normal(&seed));
    }
    for (int32_t h = 0; h < HEADS && !test.image.failed; h++) {
        ((float *)(test.image.bytes + c.scale))[h] = 0.11f + 0.17f * (float)h;
    }
    enum trial_result result = kernel_test_run(&test, call_quantize, &c);
    if (result == TRIAL_PASSED) {
        result = verify_quantize(&test, &c);
    }
    if (result == TRIAL_PASSED && trial->tested->caps.features & ATTN_FEATURE_BATCH_INVARIANT) {
        result = kernel_test_parts(&test, call_quantize, &c, &c.part, PARTS);
    }
    kernel_test_finish(&test);
    return result;
}

struct amax_variant {
    int32_t dtype;
    bool per_head;
    bool accumulate;
    int32_t history;
};

struct amax_case {
    struct amax_variant v;
    size_t x, out, history, scale;
};

static attn_status call_amax(struct backend *backend, uint8_t *base, const struct device *device,
                             void *stream, const void *context, struct attn_error *error)
{
    const struct amax_case *c = context;
    struct case_tensor x = case_rows(TOKENS, HEADS, DIMS);
    struct attn_amax_args args = {.struct_size = sizeof args,
                                  .instance = backend->instance,
                                  .stream = stream,
                                  .x = case_bind(&x, base + c->x, device, c->v.dtype, 3),
                                  .out = (float *)(base + c->out),
                                  .per_head = c->v.per_head,
                                  .accumulate = c->v.accumulate};
    if (c->v.history > 0) {
        args.history = (float *)(base + c->history);
        args.scale = (float *)(base + c->scale);
        args.history_len = c->v.history;
    }
    struct watch watch;
    watch_begin(&watch);
    return watch_end(&watch, backend, backend->kernels.amax(&args, error), error);
}

/* Compared exactly, since it is one of the inputs. */
static enum trial_result run_amax(struct trial *trial, const void *variant, uint64_t seed)
{
    struct amax_case c = {.v = *(const struct amax_variant *)variant};
    struct kernel_test test;
    size_t bytes = (c.v.per_head ? HEADS : 1) * sizeof(float);
    kernel_test_init(&test, trial);
    c.x = kernel_test_add(&test, "x", ELEMENTS * number_bytes(c.v.dtype), false);
    c.out = kernel_test_add(&test, "out", bytes, true);
    c.history = kernel_test_add(&test, "history", (size_t)(c.v.history + 1) * sizeof(float), true);
    c.scale = kernel_test_add(&test, "scale", sizeof(float), true);
    if (!test.image.failed) {
        number_fill_normal(test.image.bytes + c.x, 0, ELEMENTS, c.v.dtype, 3, &seed);
    }
    for (int32_t n = 0; n < c.v.history && !test.image.failed; n++) {
        ((float *)(test.image.bytes + c.history))[n] =
            n == 0   ? 500.0f
            : n == 1 ? 400.0f
                     : (float)(n % 7); /* the first goes, the second stays */
    }
    for (size_t h = 0; h < bytes / sizeof(float) && !test.image.failed; h++) {
        ((float *)(test.image.bytes + c.out))[h] = h % 2 ? 1.0f : 100.0f;
    }
    enum trial_result result = kernel_test_run(&test, call_amax, &c);
    if (result == TRIAL_PASSED && memcmp(test.expected + c.out, test.found + c.out, bytes) != 0) {
        result = trial_say(trial, TRIAL_FAILED, "%g is not the largest magnitude %g",
                           *(const float *)(test.found + c.out),
                           *(const float *)(test.expected + c.out));
    }
    const size_t kept = (size_t)c.v.history * sizeof(float);
    if (result == TRIAL_PASSED && kept > 0 &&
        (memcmp(test.expected + c.history, test.found + c.history, kept) != 0 ||
         memcmp(test.expected + c.scale, test.found + c.scale, sizeof(float)) != 0)) {
        result = trial_say(trial, TRIAL_FAILED, "the history is another, or its scale %g is not %g",
                           (double)*(const float *)(test.found + c.scale),
                           (double)*(const float *)(test.expected + c.scale));
    }
    kernel_test_finish(&test);
    return result;
}

static void try_quantize(const struct kernel_sink *sink, struct quantize_variant v)
{
    static const char *const forms[] = {"plain", "fp8_static", "fp8_group_64", "fp8_group_128",
                                        "nvfp4"};
    char name[128];
    snprintf(name, sizeof name, "quantize.%s.%s.%s%s%s%s", forms[v.form], dtype_name(v.dtype),
             dtype_name(v.out_dtype), v.scale_form == ATTN_SCALE_PER_HEAD ? ".per_head" : "",
             v.pow2 ? ".pow2" : "", v.column_major ? ".column_major" : "");
    sink->try(sink->user, name, run_quantize, &v);
}

void quantize_cases(const struct kernel_sink *sink)
{
    static const int32_t codes[] = {ATTN_DTYPE_FP8_E4M3, ATTN_DTYPE_FP8_E5M2, ATTN_DTYPE_INT8};
    const uint64_t kernels = sink->caps->kernels;
    char name[96];
    for (int32_t dtype = ATTN_DTYPE_F16; dtype <= ATTN_DTYPE_F32; dtype++) {
        bool there = sink->caps->dtypes >> dtype & 1;
        for (int32_t i = 0; i < 6 && there && (kernels & ATTN_KERNEL_QUANTIZE); i++) {
            try_quantize(sink, (struct quantize_variant){
                                   ATTN_OUTPUT_FP8_STATIC, dtype, codes[i / 2],
                                   i % 2 ? ATTN_SCALE_PER_HEAD : ATTN_SCALE_PER_TENSOR, 0, 0});
        }
        for (int32_t i = 0; i < 8 && there && (kernels & ATTN_KERNEL_QUANTIZE); i++) {
            int32_t form = i / 4 ? ATTN_OUTPUT_FP8_GROUP_128 : ATTN_OUTPUT_FP8_GROUP_64;
            try_quantize(sink, (struct quantize_variant){form, dtype, ATTN_DTYPE_FP8_E4M3, 0,
                                                         i % 2 != 0, i / 2 % 2 != 0});
        }
        if (there && (kernels & ATTN_KERNEL_QUANTIZE)) {
            try_quantize(sink, (struct quantize_variant){ATTN_OUTPUT_NVFP4, dtype,
                                                         ATTN_DTYPE_FP8_E4M3, 0, 0, 0});
        }
        for (int32_t i = 0; i < 4 && there && (kernels & ATTN_KERNEL_AMAX); i++) {
            struct amax_variant v = {dtype, i % 2 != 0, i / 2 != 0, 0};
            snprintf(name, sizeof name, "amax.%s.%s%s", dtype_name(dtype),
                     v.per_head ? "per_head" : "per_tensor", v.accumulate ? ".accumulate" : "");
            sink->try(sink->user, name, run_amax, &v);
        }
        static const int32_t histories[] = {1, 16, 1000};
        for (int32_t i = 0; i < 3 && there && (kernels & ATTN_KERNEL_AMAX) &&
                            sink->caps->features & ATTN_FEATURE_AMAX_HISTORY;
             i++) {
            struct amax_variant v = {dtype, false, false, histories[i]};
            snprintf(name, sizeof name, "amax.%s.history%d", dtype_name(dtype), v.history);
            sink->try(sink->user, name, run_amax, &v);
        }
    }
}
