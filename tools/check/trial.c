/* SPDX-License-Identifier: Apache-2.0 */
#include "trial.h"

#include <malloc.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compare.h"
#include "number.h"

#define PLAN_GUARD 256

const char *const trial_way_names[TRIAL_WAY_COUNT] = {
    "plain", "replanned", "two_plans", "table_update", "replay", "alone"};

bool trial_way_declared(const struct attn_backend_caps *caps, int32_t way)
{
    switch (way) {
    case TRIAL_TABLE_UPDATE:
        return (caps->features & ATTN_FEATURE_UPDATE_BLOCK_TABLE) != 0;
    case TRIAL_REPLAY:
        return caps->graph_level > ATTN_GRAPH_NEVER;
    case TRIAL_ALONE:
        return (caps->features & ATTN_FEATURE_BATCH_INVARIANT) != 0;
    default:
        return true;
    }
}

static enum trial_result say(struct trial *trial, enum trial_result result, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(trial->message, sizeof trial->message, format, arguments);
    va_end(arguments);
    return result;
}

static enum trial_result call_failed(struct trial *trial, const char *what, attn_status status,
                                     const struct attn_error *error)
{
    return say(trial, TRIAL_FAILED, "%s: status %d: %s: %s", what, status, error->field,
               error->message);
}

/* One plan's memory, exactly as large as asked for, with guards behind both parts. */
struct plan_memory {
    size_t host_bytes, device_bytes;
    uint8_t *host;
    uint8_t *device;
};

/* A backend's copy of an image, bound, with its state and plan. */
struct side {
    struct backend *backend;
    const struct device *device;
    struct binding binding;
    uint8_t *memory; /* in the device's memory */
    attn_state *state;
    struct plan_memory plan;
    void *stream;
};

static void side_finish(struct side *side)
{
    if (side->state != NULL) {
        side->backend->kernels.release(side->backend->instance, side->state);
    }
    device_free(side->device, side->memory);
    device_free(side->device, side->plan.device);
    free(side->plan.host);
    device_stream_destroy(side->device, side->stream);
}

static bool side_init(struct side *side, struct backend *backend, const struct device *device,
                      const struct problem *problem, int32_t way)
{
    memset(side, 0, sizeof *side);
    side->backend = backend;
    side->device = device;
    side->memory = device_alloc(device, problem->image.size);
    if (side->memory == NULL ||
        !device_write(device, side->memory, problem->image.bytes, problem->image.size)) {
        return false;
    }
    side->stream = device_stream_create(device);
    problem_bind(problem, &side->binding, side->memory, problem->image.bytes, device->device);
    side->binding.layer.batch_invariant = way == TRIAL_ALONE;
    side->binding.attend.instance = backend->instance;
    side->binding.attend.stream = side->stream;
    side->binding.write.instance = backend->instance;
    side->binding.write.stream = side->stream;
    side->binding.write_context.instance = backend->instance;
    side->binding.write_context.stream = side->stream;
    return true;
}

static attn_status side_prepare(struct side *side, const struct problem *problem, int32_t factor,
                                struct attn_error *error)
{
    const struct attn_kernels *kernels = &side->backend->kernels;
    struct plan_memory *plan = &side->plan;
    struct attn_limits limits = {sizeof limits, NULL, problem->num_reqs * factor,
                                 problem->num_tokens * factor,
                                 side->binding.batch.max_query_len * factor,
                                 side->binding.batch.max_seq_len * factor,
                                 (int32_t)problem->table_stride * factor, 0};
    struct attn_plan_size size = {sizeof size, NULL, 0, 0};
    attn_status status = ATTN_OK;
    if (kernels->prepare != NULL) {
        status = kernels->prepare(side->backend->instance, &side->binding.layer,
                                  &side->binding.params, problem->phase, &side->state, error);
    }
    if (status == ATTN_OK && kernels->plan_size != NULL) {
        status =
            kernels->plan_size(side->backend->instance, side->state, &limits, &size, error);
    }
    if (status != ATTN_OK) {
        return status;
    }
    plan->host_bytes = size.host_bytes;
    plan->device_bytes = size.device_bytes;
    plan->host = aligned_alloc(256, (size.host_bytes + 2 * PLAN_GUARD) / 256 * 256);
    plan->device = device_alloc(side->device, size.device_bytes + PLAN_GUARD);
    uint8_t *poison = malloc(size.device_bytes + PLAN_GUARD);
    if (plan->host == NULL || plan->device == NULL || poison == NULL) {
        free(poison);
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    memset(plan->host, IMAGE_POISON, size.host_bytes + PLAN_GUARD);
    memset(poison, IMAGE_POISON, size.device_bytes + PLAN_GUARD);
    bool written =
        device_write(side->device, plan->device, poison, size.device_bytes + PLAN_GUARD);
    free(poison);
    side->binding.attend.state = side->state;
    side->binding.attend.plan_host = plan->host;
    side->binding.attend.workspace = plan->device;
    return written ? ATTN_OK : ATTN_ERROR_DEVICE;
}

static attn_status side_plan(struct side *side, int32_t mode, struct attn_error *error)
{
    struct attn_attend_args args = side->binding.attend;
    args.q = args.k = args.v = args.out = args.lse = NULL;
    if (side->backend->kernels.plan == NULL) {
        return ATTN_OK;
    }
    return side->backend->kernels.plan(&args, mode, error);
}

static bool guards_whole(struct side *side)
{
    uint8_t guard[PLAN_GUARD];
    if (!device_read(side->device, guard, side->plan.device + side->plan.device_bytes,
                     PLAN_GUARD)) {
        return false;
    }
    for (size_t i = 0; i < PLAN_GUARD; i++) {
        if (guard[i] != IMAGE_POISON || side->plan.host[side->plan.host_bytes + i] != IMAGE_POISON) {
            return false;
        }
    }
    return true;
}

/* Writes the step's keys with the backend's own kernel. */
static attn_status side_write(struct side *side, const struct problem *problem,
                              struct attn_error *error)
{
    if (!problem->paged || side->backend->kernels.write_kv == NULL) {
        return ATTN_OK;
    }
    return side->backend->kernels.write_kv(&side->binding.write, error);
}

/* The plan of another batch in the same memory: the same requests, each one key shorter where it has a context. The
 * lengths are changed in the side's own memory and put back. */
static attn_status plan_shorter(struct side *side, const struct problem *problem, int32_t mode,
                                struct attn_error *error)
{
    int32_t shorter[PROBLEM_MAX_REQS], lengths[PROBLEM_MAX_REQS];
    uint8_t *seq_lens = side->memory + problem->at.seq_lens;
    size_t bytes = (size_t)problem->num_reqs * sizeof *lengths;
    for (int32_t r = 0; r < problem->num_reqs; r++) {
        const struct request *request = &problem->requests[r];
        lengths[r] = request->seq_len;
        shorter[r] = request->seq_len - (request->seq_len > request->query_len);
    }
    if (!device_write(side->device, seq_lens, shorter, bytes)) {
        return ATTN_ERROR_DEVICE;
    }
    side->binding.batch.seq_lens_host = shorter;
    attn_status status = side_plan(side, mode, error);
    side->binding.batch.seq_lens_host =
        (const int32_t *)(problem->image.bytes + problem->at.seq_lens);
    uint8_t drained; /* reading waits for the plan's own work */
    bool ok = device_read(side->device, &drained, seq_lens, 1) &&
              device_write(side->device, seq_lens, lengths, bytes);
    return status != ATTN_OK || ok ? status : ATTN_ERROR_DEVICE;
}

static attn_status plan_by_way(struct side *side, const struct problem *problem, int32_t way,
                               struct attn_error *error)
{
    attn_status status = ATTN_OK;
    if (way == TRIAL_REPLANNED && problem->paged) {
        status = plan_shorter(side, problem, ATTN_PLAN_EAGER, error);
    } else if (way == TRIAL_REPLAY) {
        status = plan_shorter(side, problem, ATTN_PLAN_CAPTURE, error);
        return status == ATTN_OK ? side_plan(side, ATTN_PLAN_REPLAY, error) : status;
    } else if (way == TRIAL_TABLE_UPDATE) {
        const int32_t *table = side->binding.batch.block_table;
        side->binding.batch.block_table = (const int32_t *)(side->memory + problem->at.other_table);
        status = side_plan(side, ATTN_PLAN_EAGER, error);
        side->binding.batch.block_table = table;
        if (status == ATTN_OK && side->backend->kernels.update_block_table != NULL) {
            struct attn_attend_args args = side->binding.attend;
            args.q = args.k = args.v = args.out = args.lse = NULL;
            status = side->backend->kernels.update_block_table(&args, error);
        }
        return status;
    }
    return status == ATTN_OK ? side_plan(side, ATTN_PLAN_EAGER, error) : status;
}

static enum trial_result hold_lse(struct trial *trial, const struct problem *problem,
                                  const struct attn_tensor *lse, const uint8_t *expected,
                                  const uint8_t *found)
{
    /* Absolute: the logarithm of a sum of probabilities that are good to half a unit of the activations' format. */
    static const double bounds[] = {
        [ATTN_DTYPE_F16] = 0x1p-10, [ATTN_DTYPE_BF16] = 0x1p-7, [ATTN_DTYPE_F32] = 0x1p-12};
    double bound = bounds[problem->v[FACTOR_DTYPE].a];
    for (int64_t h = 0; h < lse->shape[0]; h++) {
        for (int64_t t = 0; t < problem->num_actual_tokens; t++) {
            int64_t at = h * lse->strides[0] + t * lse->strides[1];
            double want = ((const float *)expected)[at];
            double have = ((const float *)found)[at];
            bool same = want == have || fabs(want - have) <= bound;
            if (!same) {
                return say(trial, TRIAL_FAILED, "lse of head %d, token %d is %g, not %g", (int)h,
                           (int)t, have, want);
            }
        }
    }
    return TRIAL_PASSED;
}

static enum trial_result hold(struct trial *trial, const struct problem *problem,
                              struct side *reference, struct side *tested)
{
    struct mismatch worst = {0};
    enum trial_result result = TRIAL_PASSED;
    const uint8_t *expected = reference->memory;
    uint8_t *found = malloc(problem->image.size);
    if (found == NULL ||
        !device_read(tested->device, found, tested->memory, problem->image.size)) {
        free(found);
        return say(trial, TRIAL_FAILED, "the outputs cannot be read back");
    }
    int32_t dtype = problem->v[FACTOR_DTYPE].a;
    bool fp8 = problem->v[FACTOR_KV_DTYPE].a >= ATTN_KV_FP8_E4M3;
    double ratio = compare_rows(expected + problem->at.out, found + problem->at.out,
                                &tested->binding.out, dtype, problem->num_actual_tokens,
                                bound_for(dtype, fp8), &worst);
    int64_t stray = image_stray_write(&problem->image, found);
    trial->max_error = ratio > trial->max_error ? ratio : trial->max_error;
    if (ratio > 1) {
        result = say(trial, TRIAL_FAILED,
                     "out[token %lld, head %d, dim %d] is %g, not %g; allowed error %g",
                     (long long)worst.token, worst.head, worst.dim, worst.found, worst.expected,
                     worst.allowed);
    } else if (stray >= 0) {
        result = say(trial, TRIAL_FAILED, "byte %lld outside of all outputs was written",
                     (long long)stray);
    } else if (!guards_whole(tested)) {
        result = say(trial, TRIAL_FAILED, "the plan's memory was written past its size");
    } else {
        size_t row = (size_t)tested->binding.out.strides[0] * number_bytes(dtype);
        size_t padding = problem->at.out + (size_t)problem->num_actual_tokens * row;
        size_t rows = (size_t)(problem->num_tokens - problem->num_actual_tokens);
        size_t cache = problem->at.context_k - problem->at.k_cache;
        if (memcmp(expected + padding, found + padding, rows * row) != 0) {
            result = say(trial, TRIAL_FAILED, "padding rows of out were written");
        } else if (memcmp(expected + problem->at.k_cache, found + problem->at.k_cache, cache)) {
            result = say(trial, TRIAL_FAILED, "the cache's bytes differ from the reference's");
        }
    }
    if (result == TRIAL_PASSED && tested->binding.attend.lse != NULL) {
        result = hold_lse(trial, problem, &tested->binding.lse, expected + problem->at.lse,
                          found + problem->at.lse);
    }
    free(found);
    return result;
}

/* The reference fills the cache's context in the initial image, so that both sides start from the same bytes. */
static attn_status write_context(struct trial *trial, struct problem *problem,
                                 const struct device *host, struct attn_error *error)
{
    struct side side;
    attn_status status = ATTN_ERROR_OUT_OF_MEMORY;
    if (!problem->paged) {
        return ATTN_OK;
    }
    if (side_init(&side, trial->reference, host, problem, TRIAL_PLAIN)) {
        status = side.backend->kernels.write_kv(&side.binding.write_context, error);
        memcpy(problem->image.bytes, side.memory, problem->image.size);
    }
    side_finish(&side);
    return status;
}

static void refuse(void *user, const char *field, const char *asked, const char *supported)
{
    struct trial *trial = user;
    snprintf(trial->message, sizeof trial->message, "refused: %s %s, supported: %s", field, asked,
             supported);
}

static bool supported(struct trial *trial, const struct binding *binding, int32_t phase)
{
    struct attn_reason_sink sink = {sizeof sink, NULL, trial, refuse};
    trial->message[0] = '\0';
    if (trial->tested->plugin->supports == NULL) {
        return true;
    }
    return trial->tested->plugin->supports(&trial->tested->caps, &binding->layer, phase, &sink,
                                           NULL) == ATTN_OK &&
           trial->message[0] == '\0';
}

/* After the whole batch: every request again as a batch of its own, over the same outputs, which must not change by
 * a bit. Views with query_start_loc[0] above 0 are what the core hands out, too. */
static enum trial_result run_alone(struct trial *trial, const struct problem *problem,
                                   struct side *tested, struct attn_error *error)
{
    const struct attn_batch whole = tested->binding.batch;
    size_t bytes = problem->image.size;
    uint8_t *together = malloc(bytes), *alone = malloc(bytes);
    enum trial_result result = TRIAL_PASSED;
    attn_status status = ATTN_OK;
    if (together == NULL || alone == NULL ||
        !device_read(tested->device, together, tested->memory, bytes)) {
        result = say(trial, TRIAL_FAILED, "no memory for the case");
    }
    for (int32_t r = 0; r < problem->num_reqs && result == TRIAL_PASSED && status == ATTN_OK; r++) {
        struct attn_batch *one = &tested->binding.batch;
        *one = whole;
        one->num_reqs = 1;
        one->query_start_loc += r;
        one->query_start_loc_host += r;
        one->num_actual_tokens = one->query_start_loc_host[1];
        if (problem->paged) {
            one->seq_lens += r;
            one->seq_lens_host += r;
            one->block_table += one->block_table_row != NULL ? 0 : r * one->block_table_stride;
            one->block_table_row += one->block_table_row != NULL ? r : 0;
        }
        one->key_start_loc += one->key_start_loc != NULL ? r : 0;
        one->key_start_loc_host += one->key_start_loc_host != NULL ? r : 0;
        one->causal_per_request += one->causal_per_request != NULL ? r : 0;
        one->span_start_loc += one->span_start_loc != NULL ? r : 0;
        if (one->tree != NULL) {
            one->tree = (const uint32_t *)one->tree + r * one->tree_stride_request;
        }
        status = side_plan(tested, ATTN_PLAN_EAGER, error);
        if (status == ATTN_OK) {
            status = tested->backend->kernels.attend(&tested->binding.attend, error);
        }
    }
    tested->binding.batch = whole;
    if (result == TRIAL_PASSED && status != ATTN_OK) {
        result = call_failed(trial, "attend of one request", status, error);
    } else if (result == TRIAL_PASSED &&
               (!device_read(tested->device, alone, tested->memory, bytes) ||
                memcmp(alone, together, problem->image.used) != 0)) {
        result = say(trial, TRIAL_FAILED, "a request alone gives other bits than in its batch");
    }
    free(together);
    free(alone);
    return result;
}

static enum trial_result run_tested(struct trial *trial, const struct problem *problem,
                                    struct side *reference, struct side *tested, int32_t way)
{
    struct attn_error error = ATTN_ERROR_INIT;
    struct side other = {0};
    enum trial_result result;
    attn_status status = side_prepare(tested, problem, way == TRIAL_REPLAY ? 2 : 1, &error);
    if (status != ATTN_OK) {
        return call_failed(trial, "prepare or plan_size", status, &error);
    }
    status = side_write(tested, problem, &error);
    if (status != ATTN_OK) {
        return call_failed(trial, "write_kv", status, &error);
    }
    long before = atomic_load(&tested->backend->services.allocations);
    size_t heap = mallinfo2().uordblks;
    status = plan_by_way(tested, problem, way, &error);
    if (status != ATTN_OK) {
        return call_failed(trial, "plan", status, &error);
    }
    if (way == TRIAL_TWO_PLANS) {
        if (!side_init(&other, tested->backend, tested->device, problem, way) ||
            side_prepare(&other, problem, 1, &error) != ATTN_OK ||
            plan_shorter(&other, problem, ATTN_PLAN_EAGER, &error) != ATTN_OK) {
            side_finish(&other);
            return call_failed(trial, "second plan", ATTN_ERROR_INTERNAL, &error);
        }
        before = atomic_load(&tested->backend->services.allocations);
        heap = mallinfo2().uordblks;
    }
    status = tested->backend->kernels.attend(&tested->binding.attend, &error);
    long after = atomic_load(&tested->backend->services.allocations);
    size_t heap_after = mallinfo2().uordblks;
    if (way == TRIAL_TWO_PLANS) {
        side_finish(&other);
    }
    if (status != ATTN_OK) {
        return call_failed(trial, "attend", status, &error);
    }
    result = hold(trial, problem, reference, tested);
    if (result == TRIAL_PASSED && way == TRIAL_ALONE) {
        return run_alone(trial, problem, tested, &error);
    }
    if (result == TRIAL_PASSED && !trial->concurrent && (after != before || heap_after > heap) &&
        tested->device->context == NULL) {
        result = say(trial, TRIAL_FAILED, "a step allocated memory");
    }
    return result;
}

enum trial_result trial_attend(struct trial *trial, const struct case_space *space,
                               const struct attend_case *attend_case, uint64_t seed, int32_t way)
{
    const struct device host = {.device = {ATTN_DEVICE_CPU, 0}};
    struct attn_error error = ATTN_ERROR_INIT;
    struct problem problem;
    struct side reference = {.device = &host}, tested = {.device = trial->device};
    enum trial_result result;
    attn_status status;
    if (!problem_init(&problem, space, attend_case, seed)) {
        return say(trial, TRIAL_FAILED, "no memory for the case");
    }
    status = write_context(trial, &problem, &host, &error);
    if (status != ATTN_OK) {
        result = call_failed(trial, "reference write_kv", status, &error);
    } else if (!side_init(&reference, trial->reference, &host, &problem, way) ||
               !side_init(&tested, trial->tested, trial->device, &problem, way)) {
        result = say(trial, TRIAL_FAILED, "no memory for the case");
    } else if (!supported(trial, &tested.binding, problem.phase)) {
        result = TRIAL_SKIPPED;
    } else {
        status = side_prepare(&reference, &problem, 1, &error);
        status = status == ATTN_OK ? side_write(&reference, &problem, &error) : status;
        status = status == ATTN_OK ? side_plan(&reference, ATTN_PLAN_EAGER, &error) : status;
        status = status == ATTN_OK
                     ? reference.backend->kernels.attend(&reference.binding.attend, &error)
                     : status;
        result = status == ATTN_OK ? run_tested(trial, &problem, &reference, &tested, way)
                                   : call_failed(trial, "reference", status, &error);
    }
    side_finish(&tested);
    side_finish(&reference);
    problem_finish(&problem);
    return result;
}
