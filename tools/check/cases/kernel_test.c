/* SPDX-License-Identifier: Apache-2.0 */
#include "cases/kernel_test.h"

#include <stdlib.h>
#include <string.h>

#include "harness/places.h"
#include "support/number.h"

void kernel_test_init(struct kernel_test *test, struct trial *trial)
{
    *test = (struct kernel_test){.trial = trial};
    image_init(&test->image);
}

void kernel_test_finish(struct kernel_test *test)
{
    place_forget(test->memory);
    device_free(test->trial->device, test->memory);
    free(test->expected);
    free(test->found);
    image_finish(&test->image);
}

size_t kernel_test_add(struct kernel_test *test, const char *name, size_t bytes, bool writable)
{
    return image_add(&test->image, name, bytes, 256, writable);
}

static bool take_memory(struct kernel_test *test)
{
    const struct device *device = test->trial->device;
    size_t bytes = test->image.size;
    if (test->image.failed) {
        return false;
    }
    test->expected = malloc(bytes);
    test->found = malloc(bytes);
    test->memory = device_alloc(device, bytes);
    if (test->expected == NULL || test->found == NULL || test->memory == NULL) {
        return false;
    }
    place_image(test->memory, &test->image);
    memcpy(test->expected, test->image.bytes, bytes);
    return device_write(device, test->memory, test->image.bytes, bytes);
}

enum trial_result verify_image(struct trial *trial, const struct image *image, const uint8_t *after)
{
    char place[PLACE_TEXT];
    int64_t stray = image_stray_write(image, after);
    return stray < 0 ? TRIAL_PASSED
                     : trial_say(trial, TRIAL_FAILED, "a byte that is no output was written: %s",
                                 place_of_offset(image, stray, place));
}

enum trial_result kernel_test_run(struct kernel_test *test, kernel_test_call *call,
                                  const void *context)
{
    struct trial *trial = test->trial;
    struct attn_error error = ATTN_ERROR_INIT;
    if (!take_memory(test)) {
        return trial_say(trial, TRIAL_FAILED, "no memory for the case");
    }
    attn_status status =
        call(trial->reference, test->expected, &device_host, NULL, context, &error);
    if (status != ATTN_OK) {
        return trial_call_failed(trial, "reference", status, &error);
    }
    void *stream = device_stream_create(trial->device);
    status = call(trial->tested, test->memory, trial->device, stream, context, &error);
    bool read = device_read(trial->device, test->found, test->memory, test->image.size);
    device_stream_destroy(trial->device, stream);
    if (status == ATTN_ERROR_UNSUPPORTED || (test->optional && status != ATTN_OK)) {
        return trial_call_refused(trial, &error);
    }
    if (status != ATTN_OK) {
        return trial_call_failed(trial, "kernel", status, &error);
    }
    if (!read) {
        return trial_say(trial, TRIAL_FAILED, "the outputs cannot be read back");
    }
    return verify_image(trial, &test->image, test->found);
}

enum trial_result kernel_test_parts(struct kernel_test *test, kernel_test_call *call,
                                    const void *context, int32_t *part, int32_t num_parts)
{
    struct trial *trial = test->trial;
    struct attn_error error = ATTN_ERROR_INIT;
    const struct image *image = &test->image;
    enum trial_result result = TRIAL_PASSED;
    char place[PLACE_TEXT];
    size_t at = 0;
    uint8_t *found = malloc(image->size);
    if (found == NULL || !device_write(trial->device, test->memory, image->bytes, image->size)) {
        free(found);
        return trial_say(trial, TRIAL_FAILED, "no memory for the case");
    }
    void *stream = device_stream_create(trial->device);
    for (*part = 0; *part < num_parts && result == TRIAL_PASSED; (*part)++) {
        attn_status status =
            call(trial->tested, test->memory, trial->device, stream, context, &error);
        result = status == ATTN_OK ? result
                                   : trial_call_failed(trial, "a part of the call", status, &error);
    }
    *part = -1;
    if (result == TRIAL_PASSED && !device_read(trial->device, found, test->memory, image->size)) {
        result = trial_say(trial, TRIAL_FAILED, "the outputs cannot be read back");
    }
    while (result == TRIAL_PASSED && at < image->used && found[at] == test->found[at]) {
        at++;
    }
    if (result == TRIAL_PASSED && at < image->used) {
        result = trial_say(trial, TRIAL_FAILED,
                           "batch_invariant: in parts it gives other bits than at once, from %s on",
                           place_of_offset(image, (int64_t)at, place));
    }
    device_stream_destroy(trial->device, stream);
    free(found);
    return result;
}

enum trial_result kernel_test_compare(struct kernel_test *test, const char *what, size_t at,
                                      int64_t num_rows, int64_t heads, int64_t dims, int32_t dtype,
                                      struct bound bound)
{
    const struct compared rows = {what, dtype, heads, dims, heads * dims, dims, num_rows, NULL};
    return compare_rows(test->trial, &rows, test->expected + at, test->found + at, bound);
}

struct case_tensor case_rows(int64_t rows, int64_t heads, int64_t dims)
{
    return (struct case_tensor){.shape = {rows, heads, dims}, .strides = {heads * dims, dims, 1}};
}

struct attn_tensor *case_bind(struct case_tensor *shaped, void *data, const struct device *device,
                              int32_t dtype, int32_t ndim)
{
    shaped->tensor = (struct attn_tensor){data,          device->device,  ndim, number_dtype(dtype),
                                          shaped->shape, shaped->strides, 0};
    return &shaped->tensor;
}

static int32_t ordinal(uint8_t code, bool is_int8)
{
    return is_int8 ? (int8_t)code : code & 0x80 ? -(code & 0x7f) : code;
}

bool codes_agree(const uint8_t *expected, const uint8_t *found, int64_t count, bool is_int8)
{
    int64_t off = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t apart = abs(ordinal(expected[i], is_int8) - ordinal(found[i], is_int8));
        if (apart > 1) {
            return false;
        }
        off += apart;
    }
    return off <= 2 + count / 100;
}
