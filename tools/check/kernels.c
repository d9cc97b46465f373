/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compare.h"
#include "image.h"
#include "common/number.h"
#include "common/random.h"

#define TOKENS 37
#define HEADS 5
#define DIMS 72
#define ELEMENTS (TOKENS * HEADS * DIMS)

static enum trial_result say(struct trial *trial, enum trial_result result, const char *text)
{
    snprintf(trial->message, sizeof trial->message, "%s", text);
    return result;
}

/* A tensor [TOKENS, HEADS, DIMS], or [HEADS, TOKENS] for an lse, at an offset of an image. */
struct shaped {
    struct attn_tensor tensor;
    int64_t shape[3];
    int64_t strides[3];
};

static void shaped_rows(struct shaped *s, uint8_t *data, struct attn_device device, int32_t dtype)
{
    *s = (struct shaped){.shape = {TOKENS, HEADS, DIMS}, .strides = {HEADS * DIMS, DIMS, 1}};
    s->tensor = (struct attn_tensor){data, device, 3, number_dtype(dtype), s->shape, s->strides, 0};
}

static void shaped_lse(struct shaped *s, uint8_t *data, struct attn_device device)
{
    *s = (struct shaped){.shape = {HEADS, TOKENS}, .strides = {TOKENS, 1}};
    s->tensor = (struct attn_tensor){
        data, device, 2, number_dtype(ATTN_DTYPE_F32), s->shape, s->strides, 0};
}

enum { M_PREFIX, M_PREFIX_LSE, M_SUFFIX, M_SUFFIX_LSE, M_OUT, M_LSE, M_COUNT };

static attn_status run_merge(struct backend *backend, const struct device *device, uint8_t *memory,
                             const size_t *at, int32_t dtype, struct attn_error *error)
{
    struct shaped s[M_COUNT];
    for (int32_t i = 0; i < M_COUNT; i++) {
        if (i == M_PREFIX_LSE || i == M_SUFFIX_LSE || i == M_LSE) {
            shaped_lse(&s[i], memory + at[i], device->device);
        } else {
            shaped_rows(&s[i], memory + at[i], device->device, dtype);
        }
    }
    struct attn_merge_states_args args = {.struct_size = sizeof args,
                                          .instance = backend->instance,
                                          .prefix_out = &s[M_PREFIX].tensor,
                                          .prefix_lse = &s[M_PREFIX_LSE].tensor,
                                          .suffix_out = &s[M_SUFFIX].tensor,
                                          .suffix_lse = &s[M_SUFFIX_LSE].tensor,
                                          .out = &s[M_OUT].tensor,
                                          .lse = &s[M_LSE].tensor,
                                          .first_row = 2,
                                          .num_rows = TOKENS - 4,
                                          .num_rows_with_prefix = TOKENS - 9};
    return backend->kernels.merge_states(&args, error);
}

/* Empty sides of both signs, with NaN behind them, NaN lse, and rows without a prefix. */
static void fill_merge(struct image *image, const size_t *at, int32_t dtype, uint64_t *random)
{
    for (int32_t i = 0; i < ELEMENTS; i++) {
        number_store(image->bytes + at[M_PREFIX], i, dtype, random_normal(random));
        number_store(image->bytes + at[M_SUFFIX], i, dtype, random_normal(random));
    }
    float *prefix = (float *)(image->bytes + at[M_PREFIX_LSE]);
    float *suffix = (float *)(image->bytes + at[M_SUFFIX_LSE]);
    static const float special[] = {INFINITY, -INFINITY, NAN};
    for (int32_t h = 0; h < HEADS; h++) {
        for (int32_t t = 0; t < TOKENS; t++) {
            int32_t pick = random_below(random, 12);
            prefix[h * TOKENS + t] = (float)(4 * random_normal(random));
            suffix[h * TOKENS + t] = (float)(4 * random_normal(random));
            if (pick < 3) {
                prefix[h * TOKENS + t] = special[pick];
            }
            if (pick < 2 && random_below(random, 2)) {
                suffix[h * TOKENS + t] = special[1 - pick];
            } else if (pick < 2) {
                number_store(image->bytes + at[M_PREFIX], (t * HEADS + h) * DIMS + 3, dtype, NAN);
            }
        }
    }
}

static enum trial_result hold_merge(struct trial *trial, const struct image *image,
                                    const size_t *at, int32_t dtype, const uint8_t *expected,
                                    const uint8_t *found)
{
    struct shaped rows;
    struct mismatch worst;
    shaped_rows(&rows, NULL, trial->device->device, dtype);
    size_t first = 2 * HEADS * DIMS * number_bytes(dtype);
    double ratio = compare_rows(expected + at[M_OUT] + first, found + at[M_OUT] + first,
                                &rows.tensor, dtype, NULL, TOKENS - 4, bound_of_dtype(dtype),
                                &worst);
    if (ratio > 1) {
        snprintf(trial->message, sizeof trial->message,
                 "merged row %lld, head %d, dim %d is %g, not %g", (long long)worst.token + 2,
                 worst.head, worst.dim, worst.found, worst.expected);
        return TRIAL_FAILED;
    }
    for (int32_t h = 0; h < HEADS; h++) {
        for (int32_t t = 2; t < TOKENS - 2; t++) {
            float want = ((const float *)(expected + at[M_LSE]))[h * TOKENS + t];
            float have = ((const float *)(found + at[M_LSE]))[h * TOKENS + t];
            bool same = want == have || (isnan(want) && isnan(have)) ||
                        fabsf(want - have) < 1e-4f + 1e-5f * fabsf(want);
            if (!same) {
                snprintf(trial->message, sizeof trial->message,
                         "merged lse of row %d, head %d is %g, not %g", t, h, have, want);
                return TRIAL_FAILED;
            }
        }
    }
    if (memcmp(found + at[M_OUT], image->bytes + at[M_OUT], first) != 0) {
        return say(trial, TRIAL_FAILED, "rows before first_row were written");
    }
    return image_stray_write(image, found) < 0
               ? TRIAL_PASSED
               : say(trial, TRIAL_FAILED, "bytes outside of the outputs were written");
}

static enum trial_result merge_dtype(struct trial *trial, int32_t dtype, uint64_t seed)
{
    const struct device host = {.device = {ATTN_DEVICE_CPU, 0}};
    struct attn_error error = ATTN_ERROR_INIT;
    struct image image;
    size_t at[M_COUNT];
    enum trial_result result = TRIAL_FAILED;
    image_init(&image);
    for (int32_t i = 0; i < M_COUNT; i++) {
        bool lse = i == M_PREFIX_LSE || i == M_SUFFIX_LSE || i == M_LSE;
        size_t bytes = lse ? TOKENS * HEADS * sizeof(float) : ELEMENTS * number_bytes(dtype);
        at[i] = image_add(&image, bytes, 256, i >= M_OUT);
    }
    uint8_t *expected = image.failed ? NULL : malloc(image.size);
    uint8_t *memory = image.failed ? NULL : device_alloc(trial->device, image.size);
    uint8_t *found = image.failed ? NULL : malloc(image.size);
    if (expected == NULL || memory == NULL || found == NULL) {
        say(trial, TRIAL_FAILED, "no memory for the case");
        goto done;
    }
    fill_merge(&image, at, dtype, &seed);
    memcpy(expected, image.bytes, image.size);
    device_write(trial->device, memory, image.bytes, image.size);
    if (run_merge(trial->reference, &host, expected, at, dtype, &error) != ATTN_OK ||
        run_merge(trial->tested, trial->device, memory, at, dtype, &error) != ATTN_OK) {
        say(trial, TRIAL_FAILED, error.message);
        goto done;
    }
    if (!device_read(trial->device, found, memory, image.size)) {
        say(trial, TRIAL_FAILED, "the outputs cannot be read back");
        goto done;
    }
    result = hold_merge(trial, &image, at, dtype, expected, found);
done:
    device_free(trial->device, memory);
    free(expected);
    free(found);
    image_finish(&image);
    return result;
}

static enum trial_result run_merge_states(struct trial *trial, uint64_t seed)
{
    enum trial_result result = TRIAL_PASSED;
    for (int32_t dtype = ATTN_DTYPE_F16; dtype <= ATTN_DTYPE_F32 && result == TRIAL_PASSED; dtype++) {
        if (trial->tested->caps.dtypes >> dtype & 1) {
            result = merge_dtype(trial, dtype, seed + (uint64_t)dtype);
        }
    }
    return result;
}

/* amax per tensor and per head, fresh and accumulated: compared exactly, since it is one of the inputs. */
static enum trial_result run_amax(struct trial *trial, uint64_t seed)
{
    float expected[2 * HEADS], found[2 * HEADS];
    int32_t dtype = trial->tested->caps.dtypes >> ATTN_DTYPE_BF16 & 1 ? ATTN_DTYPE_BF16
                                                                      : ATTN_DTYPE_F32;
    struct attn_error error = ATTN_ERROR_INIT;
    size_t bytes = ELEMENTS * number_bytes(dtype);
    uint8_t *host = malloc(bytes);
    uint8_t *memory = device_alloc(trial->device, bytes);
    uint8_t *out = device_alloc(trial->device, sizeof found);
    enum trial_result result = say(trial, TRIAL_FAILED, "no memory for the case");
    if (host != NULL && memory != NULL && out != NULL) {
        result = TRIAL_PASSED;
        for (int32_t i = 0; i < ELEMENTS; i++) {
            number_store(host, i, dtype, 3 * random_normal(&seed));
        }
        memset(expected, 0, sizeof expected);
        expected[0] = 4.5f; /* accumulated per tensor; [1..] per head, fresh */
        for (int32_t i = 0; i < ELEMENTS; i++) {
            float x = (float)fabs(number_load(host, i, dtype));
            int32_t h = i / DIMS % HEADS;
            expected[0] = x > expected[0] ? x : expected[0];
            expected[1 + h] = x > expected[1 + h] ? x : expected[1 + h];
        }
        memset(found, 0, sizeof found);
        found[0] = 4.5f;
        found[1] = 1e9f;
        device_write(trial->device, memory, host, bytes);
        device_write(trial->device, out, found, sizeof found);
        struct shaped x;
        shaped_rows(&x, memory, trial->device->device, dtype);
        struct attn_amax_args args = {sizeof args, NULL,         trial->tested->instance, NULL,
                                      &x.tensor,   (float *)out, 0,                       1};
        attn_status status = trial->tested->kernels.amax(&args, &error);
        args.out = (float *)out + 1;
        args.per_head = 1;
        args.accumulate = 0;
        status = status == ATTN_OK ? trial->tested->kernels.amax(&args, &error) : status;
        if (status != ATTN_OK || !device_read(trial->device, found, out, sizeof found)) {
            result = say(trial, TRIAL_FAILED, error.message);
        } else if (memcmp(found, expected, (1 + HEADS) * sizeof *found) != 0) {
            result = say(trial, TRIAL_FAILED, "amax differs from the largest magnitude");
        }
    }
    free(host);
    device_free(trial->device, memory);
    device_free(trial->device, out);
    return result;
}

/* Blocks of two caches move by pairs within the device; others stay. */
static enum trial_result run_copy_blocks(struct trial *trial, uint64_t seed)
{
    enum { BLOCKS = 9, BYTES = 96, STRIDE = 128, CACHES = 2 };
    static const int64_t pairs[] = {0, 7, 3, 5, 2, 8};
    uint8_t before[CACHES][BLOCKS * STRIDE], after[sizeof before], expected[CACHES][BLOCKS * STRIDE];
    struct attn_block_copy copies[CACHES];
    struct attn_error error = ATTN_ERROR_INIT;
    uint8_t *memory = device_alloc(trial->device, sizeof before);
    if (memory == NULL) {
        return say(trial, TRIAL_FAILED, "no memory for the case");
    }
    for (size_t i = 0; i < sizeof before; i++) {
        ((uint8_t *)before)[i] = (uint8_t)random_bits(&seed);
    }
    memcpy(expected, before, sizeof before);
    for (int32_t c = 0; c < CACHES; c++) {
        uint8_t *base = memory + c * BLOCKS * STRIDE;
        copies[c] = (struct attn_block_copy){base, base, STRIDE, STRIDE, BYTES};
        for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i += 2) {
            memcpy(expected[c] + pairs[i + 1] * STRIDE, before[c] + pairs[i] * STRIDE, BYTES);
        }
    }
    struct attn_copy_blocks_args args = {.struct_size = sizeof args,
                                         .instance = trial->tested->instance,
                                         .kind = ATTN_COPY_DEVICE_TO_DEVICE,
                                         .num_copies = CACHES,
                                         .copies = copies,
                                         .pairs = pairs,
                                         .num_pairs = sizeof pairs / sizeof *pairs / 2};
    device_write(trial->device, memory, before, sizeof before);
    attn_status status = trial->tested->kernels.copy_blocks(&args, &error);
    bool read = device_read(trial->device, after, memory, sizeof after);
    device_free(trial->device, memory);
    if (status != ATTN_OK || !read) {
        return say(trial, TRIAL_FAILED, error.message);
    }
    return memcmp(after, expected, sizeof after) == 0
               ? TRIAL_PASSED
               : say(trial, TRIAL_FAILED, "blocks do not stand where the pairs say");
}

const struct kernel_case kernel_cases[] = {
    {"merge_states", ATTN_KERNEL_MERGE_STATES, run_merge_states},
    {"amax", ATTN_KERNEL_AMAX, run_amax},
    {"copy_blocks", ATTN_KERNEL_COPY_BLOCKS, run_copy_blocks},
};
const int32_t num_kernel_cases = sizeof kernel_cases / sizeof *kernel_cases;
