/* SPDX-License-Identifier: Apache-2.0 */
/* copy_blocks between and within memories, copy, fill. */
#include "cases/kernel_test.h"
#include "kernels/kernels.h"
#include "support/client.h"
#include "support/random.h"

enum { BLOCKS = 9, BYTES = 96, STRIDE = 128, CACHES = 2, SIZE = CACHES * BLOCKS * STRIDE };
enum { FROM = 13, TO = 1001, COPIED = 333, ROWS = 7, FIRST = 64, VALUE = 0xa5 };

/* In order: blocks 5 and 7 are copied on, 0 to 2 are moved over themselves. */
static const int64_t pairs[] = {0, 7, 3, 5, 2, 8, 5, 6, 7, 4, 0, 1, 1, 2, 2, 3};
static const char *const kinds[] = {"", "host_to_device", "device_to_host", "device_to_device"};

struct copy_variant {
    const char *name;
    kernel_call_run *call;
    void (*expect)(const uint8_t *from, uint8_t *to); /* what is copied stands there */
    int32_t kind;
};

/* The device's memory is the one operand; this is the host's. */
struct copy_case {
    const struct copy_variant *v;
    const uint8_t *before;
    uint8_t *host;
};

/* Kernels are called without a stream. */
#define COPY_CALL(call, slot, args, error)                                                         \
    stopwatch_begin((call)->backend, NULL);                                                        \
    attn_status status = (call)->backend->kernels.slot(args, error);                               \
    stopwatch_end((call)->backend, NULL)

static attn_status call_copy_blocks(struct kernel_call *call, const void *context,
                                    struct attn_error *error)
{
    const struct copy_case *c = context;
    struct { /* as a newer core has them */
        struct attn_block_copy known;
        int64_t further;
    } copies[CACHES];
    uint8_t *device = call_array(call, 0);
    uint8_t *from = c->v->kind == ATTN_COPY_HOST_TO_DEVICE ? c->host : device;
    uint8_t *to = c->v->kind == ATTN_COPY_DEVICE_TO_HOST ? c->host : device;
    for (int32_t i = 0; i < CACHES; i++) {
        const size_t at = (size_t)i * BLOCKS * STRIDE;
        copies[i].known = (struct attn_block_copy){from + at, to + at, STRIDE, STRIDE, BYTES};
        copies[i].further = -1;
    }
    const struct attn_copy_blocks_args args =
        SIZED(attn_copy_blocks_args, .instance = call->backend->instance, .kind = c->v->kind,
              .num_copies = CACHES, .copies = &copies[0].known, .pairs = pairs,
              .num_pairs = sizeof pairs / sizeof *pairs / 2, .copy_stride = sizeof *copies);
    COPY_CALL(call, copy_blocks, &args, error);
    return status;
}

static void expect_blocks(const uint8_t *from, uint8_t *to)
{
    for (size_t i = 0; i < CACHES * sizeof pairs / sizeof *pairs; i += 2) {
        const int64_t *pair = &pairs[i % (sizeof pairs / sizeof *pairs)];
        const size_t at = i / (sizeof pairs / sizeof *pairs) * BLOCKS * STRIDE;
        memcpy(to + at + pair[1] * STRIDE, from + at + pair[0] * STRIDE, BYTES);
    }
}

static attn_status call_copy(struct kernel_call *call, const void *context,
                             struct attn_error *error)
{
    const struct copy_case *c = context;
    const bool from = c->v->kind == ATTN_COPY_HOST_TO_DEVICE;
    uint8_t *device = call_array(call, 0);
    const struct attn_copy_args args =
        SIZED(attn_copy_args, .instance = call->backend->instance,
              .destination = (c->v->kind == ATTN_COPY_DEVICE_TO_HOST ? c->host : device) + TO,
              .source = (from ? c->host : device) + FROM, .bytes = COPIED, .kind = c->v->kind);
    COPY_CALL(call, copy, &args, error);
    if (from) { /* the host's memory was read before the return: others have it at once */
        uint8_t drained;
        memset(c->host + FROM, 0xff, COPIED);
        device_read(call->device, &drained, device, 1);
        memcpy(c->host + FROM, c->before + FROM, COPIED);
    }
    return status;
}

static void expect_copy(const uint8_t *from, uint8_t *to)
{
    memcpy(to + TO, from + FROM, COPIED);
}

static attn_status call_fill(struct kernel_call *call, const void *context,
                             struct attn_error *error)
{
    const struct attn_fill_args args =
        SIZED(attn_fill_args, .instance = call->backend->instance,
              .destination = (uint8_t *)call_array(call, 0) + FIRST, .row_bytes = BYTES,
              .stride = STRIDE, .rows = ROWS, .value = VALUE);
    COPY_CALL(call, fill, &args, error);
    return status;
}

static void expect_fill(const uint8_t *from, uint8_t *to)
{
    for (int32_t i = 0; i < ROWS; i++) {
        memset(to + FIRST + i * STRIDE, VALUE, BYTES);
    }
}

static enum trial_result run(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct copy_variant *v = variant;
    const struct operand device = {"the device's memory", .bytes = SIZE, .written = true};
    uint8_t before[SIZE], host[SIZE], expected[SIZE];
    OWNED(kernel_test_finish) struct kernel_test test;
    kernel_test_init(&test, trial, &device, 1, NULL);
    for (int32_t i = 0; i < 2 * SIZE; i++) {
        (i < SIZE ? (uint8_t *)test_input(&test, 0) : before)[i % SIZE] =
            (uint8_t)random_bits(&seed);
    }
    memcpy(host, before, SIZE);
    memcpy(expected, before, SIZE);
    TRIAL_TRY(kernel_test_run_tested(&test, v->call, &(const struct copy_case){v, before, host}));
    v->expect(v->kind == ATTN_COPY_HOST_TO_DEVICE ? before : test_expected(&test, 0),
              v->kind == ATTN_COPY_DEVICE_TO_HOST ? expected : test_expected(&test, 0));
    TRIAL_FAIL_IF(trial, !test_same(&test, 0, SIZE) || memcmp(host, expected, SIZE) != 0,
                  "bytes do not stand where they were sent");
    return TRIAL_PASSED;
}

void copy_cases(const struct kernel_sink *sink)
{
    static const struct copy_variant copies[] = {{"copy_blocks", call_copy_blocks, expect_blocks},
                                                 {"copy", call_copy, expect_copy}};
    static const uint64_t kernels[] = {ATTN_KERNEL_COPY_BLOCKS, ATTN_KERNEL_COPY};
    for (int32_t i = 0; i < 6; i++) {
        struct copy_variant v = copies[i % 2];
        v.kind = ATTN_COPY_HOST_TO_DEVICE + i / 2;
        if (sink->caps->kernels & kernels[i % 2]) {
            kernel_try(sink, run, &v, "%s.%s", v.name, kinds[v.kind]);
        }
    }
    if (sink->caps->kernels & ATTN_KERNEL_FILL) {
        kernel_try(sink, run, &(const struct copy_variant){"fill", call_fill, expect_fill}, "fill");
    }
}
