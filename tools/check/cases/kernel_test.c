/* SPDX-License-Identifier: Apache-2.0 */
#include "cases/kernel_test.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "kernels/kernels.h"
#include "support/number.h"

struct operand operand_rows(const char *name, int32_t dtype, int64_t rows, int64_t stride_row,
                            int64_t heads, int64_t stride_head, int64_t width)
{
    if (heads == 0) {
        return (struct operand){name, dtype, 2, {rows, width}, {stride_row, 1}};
    }
    return (struct operand){name, dtype, 3, {rows, heads, width}, {stride_row, stride_head, 1}};
}

struct operand operand_in(struct operand operand, int32_t of, int64_t first)
{
    operand.slice = true;
    operand.of = of;
    operand.first = first;
    return operand;
}

static int64_t stride_of(const struct operand *o, int32_t dim)
{
    int64_t stride = 1;
    if (o->strides[o->ndim - 1] != 0) {
        return o->strides[dim];
    }
    for (int32_t i = dim + 1; i < o->ndim; i++) {
        stride *= o->shape[i];
    }
    return stride;
}

static int64_t elements_of(const struct operand *o)
{
    int64_t elements = 1;
    for (int32_t i = 0; i < o->ndim && elements > 0; i++) {
        elements = o->shape[i] > 0 ? elements + (o->shape[i] - 1) * stride_of(o, i) : 0;
    }
    return elements;
}

static size_t element_bytes(const struct operand *o)
{
    return o->ndim > 0 ? number_bytes(o->dtype) : 1;
}

static size_t bytes_of(const struct operand *o)
{
    return o->bytes > 0 || o->ndim == 0 ? o->bytes : (size_t)elements_of(o) * element_bytes(o);
}

void kernel_test_init(struct kernel_test *test, struct trial *trial, const struct operand *operands,
                      int32_t num_operands, uint64_t *random)
{
    *test =
        (struct kernel_test){.trial = trial, .operands = operands, .num_operands = num_operands};
    for (int32_t i = 0; i < num_operands; i++) {
        const struct operand *o = &operands[i];
        const size_t e = element_bytes(o), bytes = bytes_of(o);
        test->at[i] = o->slice ? test->at[o->of] + (size_t)o->first * e
                               : image_add(&test->image, o->name, bytes, 256, o->written);
        if (o->from != NULL) {
            memcpy(test_input(test, i), o->from, bytes);
        } else if (o->deviation > 0) {
            number_fill_normal(test_input(test, i), 0, (int64_t)(bytes / e), o->dtype, o->deviation,
                               random);
        }
    }
}

void kernel_test_finish(struct kernel_test *test)
{
    buffers_forget(test->memory);
    device_free(test->trial->device, test->memory);
    free(test->expected);
    free(test->found);
    image_finish(&test->image);
}

static enum trial_result take_memory(struct kernel_test *test)
{
    const size_t bytes = test->image.size;
    test->expected = memcpy(command_calloc(bytes, 1), test->image.bytes, bytes);
    test->found = command_calloc(bytes, 1);
    test->memory = device_alloc(test->trial->device, bytes);
    buffers_add(test->memory, &test->image, 0, NULL);
    TRIAL_FAIL_IF(test->trial, test->memory == NULL, "no memory for the case");
    return TRIAL_PASSED;
}

enum trial_result verify_image(struct trial *trial, const struct image *image, const uint8_t *after)
{
    char place[BUFFER_TEXT];
    int64_t stray = image_stray_write(image, after);
    return stray < 0 ? TRIAL_PASSED
                     : trial_say(trial, TRIAL_FAILED, "a byte that is no output was written: %s",
                                 buffer_at_offset(image, stray, place));
}

void call_bind(struct kernel_call *call, const struct kernel_test *test, struct backend *backend,
               const struct device *device, uint8_t *base)
{
    *call = (struct kernel_call){
        .test = test, .backend = backend, .device = device, .base = base, .part = -1};
    for (int32_t i = 0; i < test->num_operands; i++) {
        const struct operand *o = &test->operands[i];
        for (int32_t d = 0; d < o->ndim; d++) {
            call->shapes[i][d] = o->shape[d];
            call->strides[i][d] = stride_of(o, d);
        }
        if (o->ndim > 0) {
            call->tensors[i] = (struct attn_tensor){call_array(call, i),
                                                    device->device,
                                                    o->ndim,
                                                    o->as.bits > 0 ? o->as : number_dtype(o->dtype),
                                                    call->shapes[i],
                                                    call->strides[i],
                                                    0};
        }
    }
}

void call_narrow(struct kernel_call *call, int32_t operand, int32_t dim, int64_t first,
                 int64_t count)
{
    struct attn_tensor *tensor = &call->tensors[operand];
    const int64_t bytes = first * call->strides[operand][dim] * tensor->dtype.bits / 8;
    call->shapes[operand][dim] = count;
    tensor->data = (uint8_t *)tensor->data + bytes;
}

void kernel_call_begin(struct kernel_call *call)
{
    watch_begin(&call->watch);
    stopwatch_begin(call->backend, call->stream);
}

attn_status kernel_call_end(struct kernel_call *call, attn_status status, struct attn_error *error)
{
    stopwatch_end(call->backend, call->stream);
    return watch_end(&call->watch, call->backend, status, error);
}

/* The tested backend's call, or its parts one after the other (0: the whole), over the first image.
 */
static attn_status call_tested(struct kernel_test *test, kernel_call_run *run, const void *context,
                               int32_t num_parts, struct attn_error *error)
{
    const struct device *device = test->trial->device;
    void *stream = device_stream_create(device);
    attn_status status = device_write(device, test->memory, test->image.bytes, test->image.size)
                             ? ATTN_OK
                             : ATTN_ERROR_DEVICE;
    for (int32_t part = num_parts > 0 ? 0 : -1; part < num_parts && status == ATTN_OK; part++) {
        struct kernel_call call;
        call_bind(&call, test, test->trial->tested, device, test->memory);
        call.stream = stream;
        call.part = part;
        status = run(&call, context, error);
    }
    device_wait(device);
    device_stream_destroy(device, stream);
    return status;
}

struct timed_call {
    struct kernel_test *test;
    kernel_call_run *run;
    const void *context;
};

static attn_status run_timed(void *user, struct attn_error *error)
{
    const struct timed_call *timed = user;
    return call_tested(timed->test, timed->run, timed->context, 0, error);
}

enum trial_result kernel_test_time(struct kernel_test *test, kernel_call_run *run,
                                   const void *context)
{
    return stopwatch_trial(test->trial, run_timed, &(struct timed_call){test, run, context});
}

static enum trial_result run_tested(struct kernel_test *test, kernel_call_run *run,
                                    const void *context)
{
    struct trial *trial = test->trial;
    struct attn_error error = ATTN_ERROR_INIT;
    attn_status status = call_tested(test, run, context, 0, &error);
    bool read = device_read(trial->device, test->found, test->memory, test->image.size);
    if (status == ATTN_ERROR_UNSUPPORTED || (test->optional && status != ATTN_OK)) {
        return trial_call_refused(trial, &error);
    }
    if (status != ATTN_OK) {
        return trial_call_failed(trial, "kernel", status, &error);
    }
    TRIAL_FAIL_IF(trial, !read, "the outputs cannot be read back");
    TRIAL_TRY(verify_image(trial, &test->image, test->found));
    return test->outputs_outside ? TRIAL_PASSED : kernel_test_time(test, run, context);
}

enum trial_result kernel_test_run_tested(struct kernel_test *test, kernel_call_run *run,
                                         const void *context)
{
    TRIAL_TRY(take_memory(test));
    return run_tested(test, run, context);
}

enum trial_result kernel_test_run(struct kernel_test *test, kernel_call_run *run,
                                  const void *context)
{
    struct trial *trial = test->trial;
    struct attn_error error = ATTN_ERROR_INIT;
    struct kernel_call call;
    TRIAL_TRY(take_memory(test));
    call_bind(&call, test, trial->reference, &device_host, test->expected);
    TRIAL_CALL(trial, "reference", run(&call, context, &error), &error);
    return run_tested(test, run, context);
}

enum trial_result kernel_test_parts(struct kernel_test *test, kernel_call_run *run,
                                    const void *context, int32_t num_parts)
{
    struct trial *trial = test->trial;
    struct attn_error error = ATTN_ERROR_INIT;
    const struct image *image = &test->image;
    char place[BUFFER_TEXT];
    size_t at = 0;
    TRIAL_CALL(trial, "a part of the call", call_tested(test, run, context, num_parts, &error),
               &error);
    OWNED(memory_end)
    uint8_t *found = trial_read(trial, trial->device, test->memory, image->size);
    if (found == NULL) {
        return TRIAL_FAILED;
    }
    while (at < image->used && found[at] == test->found[at]) {
        at++;
    }
    TRIAL_FAIL_IF(trial, at < image->used,
                  "batch_invariant: in parts it gives other bits than at once, from %s on",
                  buffer_at_offset(image, (int64_t)at, place));
    return TRIAL_PASSED;
}

enum trial_result kernel_test_other_rows(struct kernel_test *test, int32_t operand,
                                         const uint8_t *rows)
{
    const struct operand *o = &test->operands[operand];
    const size_t row = (size_t)stride_of(o, 0) * number_bytes(o->dtype);
    const uint8_t *was = test_input(test, operand), *is = test_found(test, operand);
    for (int64_t t = 0; t < o->shape[0]; t++) {
        TRIAL_FAIL_IF(test->trial,
                      !rows[t] && memcmp(is + (size_t)t * row, was + (size_t)t * row, row) != 0,
                      "row %lld of %s is not the call's and was written", (long long)t, o->name);
    }
    return TRIAL_PASSED;
}

enum trial_result kernel_test_rest(struct kernel_test *test, int32_t operand)
{
    const uint8_t *was = test_input(test, operand), *is = test_found(test, operand);
    const size_t bytes = bytes_of(&test->operands[operand]);
    char place[BUFFER_TEXT];
    size_t at = 0;
    while (at < bytes && is[at] == was[at]) {
        at++;
    }
    TRIAL_FAIL_IF(test->trial, at < bytes, "%s is not the call's and was written",
                  buffer_at_offset(&test->image, (int64_t)(test->at[operand] + at), place));
    return TRIAL_PASSED;
}

enum trial_result kernel_test_compare(struct kernel_test *test, int32_t operand,
                                      const uint8_t *rows, struct bound bound)
{
    const struct operand *o = &test->operands[operand];
    const struct compared compared = {o->name,         o->dtype,        o->shape[1], o->shape[2],
                                      stride_of(o, 0), stride_of(o, 1), o->shape[0], rows};
    if (rows != NULL && kernel_test_other_rows(test, operand, rows) != TRIAL_PASSED) {
        return TRIAL_FAILED;
    }
    return compare_rows(test->trial, &compared, test_expected(test, operand),
                        test_found(test, operand), bound);
}

void kernel_try(const struct kernel_sink *sink, kernel_run *run, const void *variant,
                const char *format, ...)
{
    char name[192];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(name, sizeof name, format, arguments);
    va_end(arguments);
    sink->try(sink->user, name, run, variant);
}

#define LARGE_LSE 1000.0 /* a needle of huge scores has more */

static struct attend_form form_of_case(const struct factor_value *v)
{
    return (struct attend_form){.dtype = v[FACTOR_DTYPE].a,
                                .kv_dtype = v[FACTOR_KV_DTYPE].a,
                                .kv_dtype_v = case_kv(v, true),
                                .q_dtype = v[FACTOR_QUERY].a,
                                .scales_p = v[FACTOR_P_SCALE].a != 0,
                                .head_size = v[FACTOR_HEAD_SIZE].a};
}

struct bound bound_of_case(const struct factor_value *v)
{
    const struct attend_form form = form_of_case(v);
    return bound_of_attend(&form);
}

struct bound bound_of_lse(const struct factor_value *v)
{
    const struct attend_form form = form_of_case(v);
    struct bound bound = bound_of_attend_lse(&form);
    /* sums of products of both signs are good to their size, whatever is left of them */
    bound.absolute = case_score_times(v) * LARGEST_SCORE * 0x1p-20;
    return bound;
}

enum trial_result compare_rows(struct trial *trial, const struct compared *rows,
                               const void *expected, const void *found, struct bound bound)
{
    const int32_t dtype = rows->dtype;
    double largest = 1;
    for (int64_t t = 0; t < rows->num_rows; t++) {
        for (int64_t h = 0; h < rows->heads && (rows->wanted == NULL || rows->wanted[t]); h++) {
            int64_t at = t * rows->stride_row + h * rows->stride_head;
            double rms = bound_rms(expected, at, dtype, rows->dims);
            for (int64_t i = 0; i < rows->dims; i++) {
                double want = number_load(expected, at + i, dtype);
                double have = number_load(found, at + i, dtype);
                double allowed = bound_allows(bound, rms, dtype, want);
                double ratio = bound_ratio(want, have, allowed);
                if (ratio > largest) {
                    largest = ratio;
                    trial_say(trial, TRIAL_FAILED,
                              "%s[row %lld, head %d, dim %d] is %g, not %g; allowed error %g",
                              rows->what, (long long)t, (int)h, (int)i, have, want, allowed);
                }
            }
        }
    }
    return largest > 1 ? TRIAL_FAILED : TRIAL_PASSED;
}

enum trial_result compare_lse(struct trial *trial, const struct compared_lse *rows,
                              const void *expected, const void *found, struct bound bound)
{
    for (int64_t h = 0; h < rows->heads; h++) {
        for (int64_t t = rows->first_row; t < rows->first_row + rows->num_rows; t++) {
            const int64_t at = h * rows->stride_head + t * rows->stride_row;
            const double want = ((const float *)expected)[at], have = ((const float *)found)[at];
            const double allowed = bound.least + bound.relative * fabs(want) +
                                   (fabs(want) > LARGE_LSE ? bound.absolute : 0);
            if (bound_ratio(want, have, allowed) > 1 && (rows->wanted == NULL || rows->wanted[t])) {
                const double base_2 = want * 1.4426950408889634;
                const bool binary = fabs(want) > 1 && fabs(have - base_2) <= 1.5 * allowed;
                return trial_say(trial, TRIAL_FAILED, "lse of head %d, token %d is %g, not %g%s",
                                 (int)h, (int)t, have, want,
                                 binary ? ": 1.4427 times that, so in base 2; a natural "
                                          "log-sum-exp is 0.693147 times as large"
                                        : "");
            }
        }
    }
    return TRIAL_PASSED;
}
