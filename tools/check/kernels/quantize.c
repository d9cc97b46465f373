/* SPDX-License-Identifier: Apache-2.0 */
/* quantize in every form, and amax. */
#include <math.h>
#include <stdlib.h>

#include "cases/kernel_test.h"
#include "common/names.h"
#include "kernels/kernels.h"
#include "support/client.h"
#include "support/number.h"
#include "support/random.h"

enum { TOKENS = 13, HEADS = 5, DIMS = 128, ELEMENTS = TOKENS * HEADS * DIMS };
#define SCALE_TOLERANCE 1e-6

struct quantize_variant {
    int32_t form;
    int32_t dtype;
    int32_t out_dtype; /* FP8_STATIC: e4m3, or a query's */
    int32_t scale_form;
    bool pow2;
    bool column_major;
};

enum { X, OUT, SCALE, BLOCK_SCALES, NUM_OPERANDS };

/* The first rows of parts, of which the first is a row alone. */
enum { PARTS = 3 };
static const int64_t first_rows[PARTS + 1] = {0, 1, TOKENS / 2, TOKENS};

static int32_t group_of(int32_t form)
{
    return form == ATTN_OUTPUT_FP8_GROUP_64 ? 64 : form == ATTN_OUTPUT_FP8_GROUP_128 ? 128 : 16;
}

static attn_status call_quantize(struct kernel_call *call, const void *context,
                                 struct attn_error *error)
{
    const struct quantize_variant *v = context;
    struct attn_tensor *t = call->tensors;
    const struct attn_quantize_args args =
        SIZED(attn_quantize_args, .instance = call->backend->instance, .stream = call->stream,
              .form = v->form, .scale_form = v->scale_form, .scale_pow2 = v->pow2,
              .scale_column_major = v->column_major, .x = &t[X], .out = &t[OUT],
              .scale = call_array(call, SCALE),
              .block_scales = v->form != ATTN_OUTPUT_FP8_STATIC ? &t[BLOCK_SCALES] : NULL);
    if (call->part >= 0) {
        const int64_t first = first_rows[call->part], count = first_rows[call->part + 1] - first;
        call_narrow(call, X, 0, first, count);
        call_narrow(call, OUT, 0, first, count);
        call_narrow(call, BLOCK_SCALES, v->column_major, first, count);
    }
    return KERNEL_CALL(call, quantize, &args, error);
}

/* A code as its place in the order of the format's values. */
static int32_t ordinal(const uint8_t *codes, int32_t i, const struct operand *o, bool nvfp4)
{
    const int32_t sign = nvfp4 ? 8 : 0x80,
                  code = nvfp4 ? codes[i / 2] >> (i % 2 * 4) & 15 : codes[i];
    return o->dtype == ATTN_DTYPE_INT8 ? (int8_t)code : code & sign ? -(code & (sign - 1)) : code;
}

/* At most one step apart, and few of them. */
static enum trial_result verify_codes(struct kernel_test *test, int32_t operand, int32_t count,
                                      bool nvfp4)
{
    const struct operand *o = &test->operands[operand];
    int32_t num_off = 0;
    for (int32_t i = 0; i < count; i++) {
        const int32_t want = ordinal(test_expected(test, operand), i, o, nvfp4);
        const int32_t have = ordinal(test_found(test, operand), i, o, nvfp4);
        TRIAL_FAIL_IF(test->trial, abs(want - have) > 1, "code %d of %s is %d steps off", i,
                      o->name, have - want);
        num_off += want != have;
    }
    return num_off <= 2 + count / 100
               ? TRIAL_PASSED
               : trial_say(test->trial, TRIAL_FAILED, "%d of %d codes of %s are off", num_off,
                           count, o->name);
}

static enum trial_result verify_quantize(struct kernel_test *test, const struct quantize_variant *v)
{
    const bool nvfp4 = v->form == ATTN_OUTPUT_NVFP4;
    if (nvfp4 && verify_codes(test, BLOCK_SCALES, ELEMENTS / 16, false) != TRIAL_PASSED) {
        return TRIAL_FAILED;
    }
    const int32_t num_scales =
        nvfp4 || v->form == ATTN_OUTPUT_FP8_STATIC ? 0 : ELEMENTS / group_of(v->form);
    const struct compared scales = {"block_scales", ATTN_DTYPE_F32, 1, 1, 1, 1, num_scales};
    TRIAL_TRY(compare_rows(test->trial, &scales, test_expected(test, BLOCK_SCALES),
                           test_found(test, BLOCK_SCALES),
                           (struct bound){.relative = SCALE_TOLERANCE}));
    return verify_codes(test, OUT, ELEMENTS, nvfp4);
}

static enum trial_result run_quantize(struct trial *trial, const void *variant, uint64_t seed)
{
    static const float scales[HEADS] = {0.11f, 0.28f, 0.45f, 0.62f, 0.79f};
    const struct quantize_variant *v = variant;
    const bool nvfp4 = v->form == ATTN_OUTPUT_NVFP4;
    const int64_t groups = HEADS * DIMS / group_of(v->form);
    struct operand o[NUM_OPERANDS] = {
        [X] = {"x", v->dtype, 3, {TOKENS, HEADS, DIMS}},
        [OUT] = {"out", v->out_dtype, 3, {TOKENS, HEADS, DIMS / (nvfp4 ? 2 : 1)}, .written = true},
        [SCALE] = {"scale", .bytes = sizeof scales, .from = scales},
        [BLOCK_SCALES] = {"block_scales",
                          nvfp4 ? ATTN_DTYPE_FP8_E4M3 : ATTN_DTYPE_F32,
                          2,
                          {TOKENS, groups},
                          .written = true},
    };
    OWNED(kernel_test_finish) struct kernel_test test;
    if (nvfp4) { /* bytes of pairs */
        o[OUT].as = (struct attn_dtype){ATTN_CODE_UINT, 8, 1};
    }
    if (v->column_major) {
        o[BLOCK_SCALES].shape[0] = groups;
        o[BLOCK_SCALES].shape[1] = TOKENS;
    }
    kernel_test_init(&test, trial, o, NUM_OPERANDS, &seed);
    for (int32_t i = 0; i < ELEMENTS; i++) {
        /* groups of very different size, one of zeros, and some that saturate */
        double size = ldexp(1, i / 64 % 17 - 8) * (i / 64 % 23 != 7);
        number_store(test_input(&test, X), i, v->dtype, size * random_normal(&seed));
    }
    TRIAL_TRY(kernel_test_run(&test, call_quantize, v));
    TRIAL_TRY(verify_quantize(&test, v));
    return trial->tested->caps.features & ATTN_FEATURE_BATCH_INVARIANT
               ? kernel_test_parts(&test, call_quantize, v, PARTS)
               : TRIAL_PASSED;
}

struct amax_variant {
    int32_t dtype;
    bool per_head;
    bool accumulate;
    int32_t history;
};

enum { AMAX_X, AMAX_OUT, HISTORY, HISTORY_SCALE, AMAX_OPERANDS };

static attn_status call_amax(struct kernel_call *call, const void *context,
                             struct attn_error *error)
{
    const struct amax_variant *v = context;
    const struct attn_amax_args args = SIZED(
        attn_amax_args, .instance = call->backend->instance, .stream = call->stream,
        .x = &call->tensors[AMAX_X], .out = call_array(call, AMAX_OUT), .per_head = v->per_head,
        .accumulate = v->accumulate, .history = v->history > 0 ? call_array(call, HISTORY) : NULL,
        .scale = v->history > 0 ? call_array(call, HISTORY_SCALE) : NULL,
        .history_len = v->history);
    return KERNEL_CALL(call, amax, &args, error);
}

/* Compared exactly, since it is one of the inputs. */
static enum trial_result run_amax(struct trial *trial, const void *variant, uint64_t seed)
{
    static const float before[HEADS] = {100, 1, 100, 1, 100};
    const struct amax_variant *v = variant;
    const size_t bytes = (v->per_head ? HEADS : 1) * sizeof(float);
    const size_t kept = (size_t)v->history * sizeof(float);
    const struct operand o[AMAX_OPERANDS] = {
        [AMAX_X] = {"x", v->dtype, 3, {TOKENS, HEADS, DIMS}, .deviation = 3},
        [AMAX_OUT] = {"out", .bytes = bytes, .from = before, .written = true},
        [HISTORY] = {"history", .bytes = kept > 0 ? kept : sizeof(float), .written = true},
        [HISTORY_SCALE] = {"scale", .bytes = sizeof(float), .written = true},
    };
    OWNED(kernel_test_finish) struct kernel_test test;
    kernel_test_init(&test, trial, o, AMAX_OPERANDS, &seed);
    for (int32_t n = 0; n < v->history; n++) { /* the first goes, the second stays */
        ((float *)test_input(&test, HISTORY))[n] = n < 2 ? 500 - 100 * n : n % 7;
    }
    enum trial_result result = kernel_test_run(&test, call_amax, v);
    if (result == TRIAL_PASSED && !test_same(&test, AMAX_OUT, bytes)) {
        result = trial_say(trial, TRIAL_FAILED, "%g is not the largest magnitude %g",
                           *(float *)test_found(&test, AMAX_OUT),
                           *(float *)test_expected(&test, AMAX_OUT));
    }
    if (result == TRIAL_PASSED && kept > 0 &&
        !(test_same(&test, HISTORY, kept) && test_same(&test, HISTORY_SCALE, sizeof(float)))) {
        result = trial_say(trial, TRIAL_FAILED, "the history is another, or its scale %g is not %g",
                           *(float *)test_found(&test, HISTORY_SCALE),
                           *(float *)test_expected(&test, HISTORY_SCALE));
    }
    return result;
}

static void try_quantize(const struct kernel_sink *sink, struct quantize_variant v)
{
    static const char *const forms[] = {"plain", "fp8_static", "fp8_group_64", "fp8_group_128",
                                        "nvfp4"};
    kernel_try(sink, run_quantize, &v, "quantize.%s.%s.%s%s%s%s", forms[v.form],
               dtype_name(v.dtype), dtype_name(v.out_dtype),
               v.scale_form == ATTN_SCALE_PER_HEAD ? ".per_head" : "", v.pow2 ? ".pow2" : "",
               v.column_major ? ".column_major" : "");
}

void quantize_cases(const struct kernel_sink *sink)
{
    static const int32_t codes[] = {ATTN_DTYPE_FP8_E4M3, ATTN_DTYPE_FP8_E5M2, ATTN_DTYPE_INT8};
    const uint64_t kernels = sink->caps->kernels;
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
            kernel_try(sink, run_amax, &v, "amax.%s.%s%s", dtype_name(dtype),
                       v.per_head ? "per_head" : "per_tensor", v.accumulate ? ".accumulate" : "");
        }
        static const int32_t histories[] = {1, 16, 1000};
        for (int32_t i = 0; i < 3 && there && (kernels & ATTN_KERNEL_AMAX) &&
                            sink->caps->features & ATTN_FEATURE_AMAX_HISTORY;
             i++) {
            struct amax_variant v = {dtype, false, false, histories[i]};
            kernel_try(sink, run_amax, &v, "amax.%s.history%d", dtype_name(dtype), v.history);
        }
    }
}
