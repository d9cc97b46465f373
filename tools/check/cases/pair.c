/* SPDX-License-Identifier: Apache-2.0 */
#include "cases/pair.h"

#include <stdlib.h>
#include <string.h>

#include "harness/places.h"
#include "support/number.h"

void pair_init(struct pair *pair, struct trial *trial)
{
    *pair = (struct pair){.trial = trial};
    image_init(&pair->image);
}

void pair_finish(struct pair *pair)
{
    place_forget(pair->memory);
    device_free(pair->trial->device, pair->memory);
    free(pair->expected);
    free(pair->found);
    image_finish(&pair->image);
}

size_t pair_add(struct pair *pair, const char *name, size_t bytes, bool writable)
{
    return image_add(&pair->image, name, bytes, 256, writable);
}

static bool take_memory(struct pair *pair)
{
    const struct device *device = pair->trial->device;
    size_t bytes = pair->image.size;
    if (pair->image.failed) {
        return false;
    }
    pair->expected = malloc(bytes);
    pair->found = malloc(bytes);
    pair->memory = device_alloc(device, bytes);
    if (pair->expected == NULL || pair->found == NULL || pair->memory == NULL) {
        return false;
    }
    place_image(pair->memory, &pair->image);
    memcpy(pair->expected, pair->image.bytes, bytes);
    return device_write(device, pair->memory, pair->image.bytes, bytes);
}

enum trial_result verify_image(struct trial *trial, const struct image *image, const uint8_t *after)
{
    char place[PLACE_TEXT];
    int64_t stray = image_stray_write(image, after);
    return stray < 0 ? TRIAL_PASSED
                     : trial_say(trial, TRIAL_FAILED, "a byte that is no output was written: %s",
                                 place_of_offset(image, stray, place));
}

enum trial_result pair_run(struct pair *pair, pair_call *call, const void *context)
{
    struct trial *trial = pair->trial;
    struct attn_error error = ATTN_ERROR_INIT;
    if (!take_memory(pair)) {
        return trial_say(trial, TRIAL_FAILED, "no memory for the case");
    }
    attn_status status =
        call(trial->reference, pair->expected, &device_host, NULL, context, &error);
    if (status != ATTN_OK) {
        return trial_call_failed(trial, "reference", status, &error);
    }
    void *stream = device_stream_create(trial->device);
    status = call(trial->tested, pair->memory, trial->device, stream, context, &error);
    bool read = device_read(trial->device, pair->found, pair->memory, pair->image.size);
    device_stream_destroy(trial->device, stream);
    if (status == ATTN_ERROR_UNSUPPORTED || (pair->optional && status != ATTN_OK)) {
        return trial_call_refused(trial, &error);
    }
    if (status != ATTN_OK) {
        return trial_call_failed(trial, "kernel", status, &error);
    }
    if (!read) {
        return trial_say(trial, TRIAL_FAILED, "the outputs cannot be read back");
    }
    return verify_image(trial, &pair->image, pair->found);
}

enum trial_result pair_parts(struct pair *pair, pair_call *call, const void *context, int32_t *part,
                             int32_t num_parts)
{
    struct trial *trial = pair->trial;
    struct attn_error error = ATTN_ERROR_INIT;
    const struct image *image = &pair->image;
    enum trial_result result = TRIAL_PASSED;
    char place[PLACE_TEXT];
    size_t at = 0;
    uint8_t *found = malloc(image->size);
    if (found == NULL || !device_write(trial->device, pair->memory, image->bytes, image->size)) {
        free(found);
        return trial_say(trial, TRIAL_FAILED, "no memory for the case");
    }
    void *stream = device_stream_create(trial->device);
    for (*part = 0; *part < num_parts && result == TRIAL_PASSED; (*part)++) {
        attn_status status =
            call(trial->tested, pair->memory, trial->device, stream, context, &error);
        result = status == ATTN_OK ? result
                                   : trial_call_failed(trial, "a part of the call", status, &error);
    }
    *part = -1;
    if (result == TRIAL_PASSED && !device_read(trial->device, found, pair->memory, image->size)) {
        result = trial_say(trial, TRIAL_FAILED, "the outputs cannot be read back");
    }
    while (result == TRIAL_PASSED && at < image->used && found[at] == pair->found[at]) {
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

enum trial_result pair_compare(struct pair *pair, const char *what, size_t at, int64_t num_rows,
                               int64_t heads, int64_t dims, int32_t dtype, struct bound bound)
{
    const struct compared rows = {what, dtype, heads, dims, heads * dims, dims, num_rows, NULL};
    return compare_rows(pair->trial, &rows, pair->expected + at, pair->found + at, bound);
}

struct pair_tensor pair_rows(int64_t rows, int64_t heads, int64_t dims)
{
    return (struct pair_tensor){.shape = {rows, heads, dims}, .strides = {heads * dims, dims, 1}};
}

struct attn_tensor *pair_bind(struct pair_tensor *shaped, void *data, const struct device *device,
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

bool pair_codes_agree(const uint8_t *expected, const uint8_t *found, int64_t count, bool is_int8)
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
