/* SPDX-License-Identifier: Apache-2.0 */
/* copy_blocks between and within memories, copy, fill. */
#include <stdlib.h>
#include <string.h>

#include "harness/stopwatch.h"
#include "kernels/kernels.h"
#include "support/client.h"
#include "support/owned.h"
#include "support/random.h"

enum { BLOCKS = 9, BYTES = 96, STRIDE = 128, CACHES = 2, SIZE = CACHES * BLOCKS * STRIDE };

/* In order: blocks 5 and 7 are copied on, 0 to 2 are moved over themselves. */
static const int64_t pairs[] = {0, 7, 3, 5, 2, 8, 5, 6, 7, 4, 0, 1, 1, 2, 2, 3};
static const char *const kinds[] = {"", "host_to_device", "device_to_host", "device_to_device"};

/* A cache in the device's memory and another one in the host's; both are compared afterwards. */
struct memories {
    uint8_t *device;
    uint8_t before[2][SIZE]; /* the device's, the host's */
    uint8_t expected[2][SIZE];
    uint8_t host[SIZE];
    uint8_t after[SIZE];
};

static bool init(struct memories *m, const struct device *device, uint64_t *random)
{
    for (int32_t i = 0; i < 2 * SIZE; i++) {
        m->before[i / SIZE][i % SIZE] = (uint8_t)random_bits(random);
    }
    memcpy(m->expected, m->before, sizeof m->before);
    memcpy(m->host, m->before[1], SIZE);
    m->device = device_alloc(device, SIZE);
    return m->device != NULL && device_write(device, m->device, m->before[0], SIZE);
}

/* One call of the backend over the two memories; what they are to be goes into `expected`. */
typedef attn_status copy_call(struct trial *trial, struct memories *m, int32_t kind,
                              struct attn_error *error);

struct copy_variant {
    const char *what;
    copy_call *call;
    int32_t kind;
};

static attn_status call_copy_blocks(struct trial *trial, struct memories *m, int32_t kind,
                                    struct attn_error *error)
{
    struct { /* as a newer core has them */
        struct attn_block_copy known;
        int64_t further;
    } copies[CACHES];
    int32_t from = kind == ATTN_COPY_HOST_TO_DEVICE, to = kind == ATTN_COPY_DEVICE_TO_HOST;
    for (int32_t c = 0; c < CACHES; c++) {
        size_t at = (size_t)c * BLOCKS * STRIDE;
        copies[c].known =
            (struct attn_block_copy){(from ? m->host : m->device) + at,
                                     (to ? m->host : m->device) + at, STRIDE, STRIDE, BYTES};
        copies[c].further = -1;
        for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i += 2) {
            memcpy(m->expected[to] + at + pairs[i + 1] * STRIDE,
                   m->expected[from] + at + pairs[i] * STRIDE, BYTES);
        }
    }
    const struct attn_copy_blocks_args args =
        SIZED(attn_copy_blocks_args, .instance = trial->tested->instance, .kind = kind,
              .num_copies = CACHES, .copies = &copies[0].known, .pairs = pairs,
              .num_pairs = sizeof pairs / sizeof *pairs / 2, .copy_stride = sizeof *copies);
    stopwatch_begin(trial->tested, NULL);
    attn_status status = trial->tested->kernels.copy_blocks(&args, error);
    stopwatch_end(trial->tested, NULL);
    return status;
}

static attn_status call_copy(struct trial *trial, struct memories *m, int32_t kind,
                             struct attn_error *error)
{
    int32_t from = kind == ATTN_COPY_HOST_TO_DEVICE, to = kind == ATTN_COPY_DEVICE_TO_HOST;
    memcpy(m->expected[to] + 1001, m->before[from] + 13, 333);
    const struct attn_copy_args args =
        SIZED(attn_copy_args, .instance = trial->tested->instance,
              .destination = (to ? m->host : m->device) + 1001,
              .source = (from ? m->host : m->device) + 13, .bytes = 333, .kind = kind);
    stopwatch_begin(trial->tested, NULL);
    attn_status status = trial->tested->kernels.copy(&args, error);
    stopwatch_end(trial->tested, NULL);
    if (from) { /* the host's memory was read before the return: others have it at once */
        uint8_t drained;
        memset(m->host + 13, 0xff, 333);
        device_read(trial->device, &drained, m->device, 1);
        memcpy(m->host + 13, m->before[1] + 13, 333);
    }
    return status;
}

static attn_status call_fill(struct trial *trial, struct memories *m, int32_t kind,
                             struct attn_error *error)
{
    for (int32_t i = 0; i < 7; i++) {
        memset(m->expected[0] + 64 + i * STRIDE, 0xa5, BYTES);
    }
    const struct attn_fill_args args =
        SIZED(attn_fill_args, .instance = trial->tested->instance, .destination = m->device + 64,
              .row_bytes = BYTES, .stride = STRIDE, .rows = 7, .value = 0xa5);
    stopwatch_begin(trial->tested, NULL);
    attn_status status = trial->tested->kernels.fill(&args, error);
    stopwatch_end(trial->tested, NULL);
    return status;
}

struct timed_copy {
    struct trial *trial;
    struct memories *memories;
    const struct copy_variant *variant;
};

static attn_status run_timed(void *user, struct attn_error *error)
{
    const struct timed_copy *timed = user;
    return timed->variant->call(timed->trial, timed->memories, timed->variant->kind, error);
}

static enum trial_result run(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct copy_variant *v = variant;
    OWNED(memory_end) struct memories *m = calloc(1, sizeof *m);
    struct attn_error error = ATTN_ERROR_INIT;
    const bool made = m != NULL && init(m, trial->device, &seed);
    const attn_status status = made ? v->call(trial, m, v->kind, &error) : ATTN_OK;
    const bool read = made && device_read(trial->device, m->after, m->device, SIZE);
    const bool same = read && memcmp(m->after, m->expected[0], SIZE) == 0 &&
                      memcmp(m->host, m->expected[1], SIZE) == 0;
    const enum trial_result timed =
        same && status == ATTN_OK
            ? stopwatch_trial(trial, run_timed, &(struct timed_copy){trial, m, v})
            : TRIAL_PASSED;
    device_free(trial->device, m != NULL ? m->device : NULL);
    TRIAL_FAIL_IF(trial, !made, "no memory for the case");
    if (status == ATTN_ERROR_UNSUPPORTED) {
        return trial_call_refused(trial, &error);
    }
    TRIAL_CALL(trial, v->what, read ? status : ATTN_ERROR_DEVICE, &error);
    TRIAL_FAIL_IF(trial, !same, "bytes do not stand where they were sent");
    return timed;
}

void copy_cases(const struct kernel_sink *sink)
{
    static const struct {
        uint64_t kernel;
        const char *name;
        copy_call *call;
    } calls[] = {{ATTN_KERNEL_COPY_BLOCKS, "copy_blocks", call_copy_blocks},
                 {ATTN_KERNEL_COPY, "copy", call_copy}};
    for (int32_t i = 0; i < 6; i++) {
        const struct copy_variant v = {calls[i % 2].name, calls[i % 2].call,
                                       ATTN_COPY_HOST_TO_DEVICE + i / 2};
        if (sink->caps->kernels & calls[i % 2].kernel) {
            kernel_try(sink, run, &v, "%s.%s", v.what, kinds[v.kind]);
        }
    }
    if (sink->caps->kernels & ATTN_KERNEL_FILL) {
        kernel_try(sink, run, &(const struct copy_variant){"fill", call_fill, 0}, "fill");
    }
}
