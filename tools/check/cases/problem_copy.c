/* SPDX-License-Identifier: Apache-2.0 */
#include "cases/side.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/places.h"

void side_finish(struct side *side)
{
    if (side->backend != NULL) {
        const struct attn_attend_args made = {.instance = side->backend->instance,
                                              .prepared = side->prepared,
                                              .plan_state = side->plan_state};
        planned_release(&side->backend->kernels, &made);
    }
    place_forget(side->memory);
    device_free(side->device, side->memory);
    plan_memory_finish(&side->plan, side->device);
    device_stream_destroy(side->device, side->stream);
}

bool side_init(struct side *side, struct backend *backend, const struct device *device,
               const struct problem *problem)
{
    memset(side, 0, sizeof *side);
    side->backend = backend;
    side->device = device;
    side->memory = device_alloc(device, problem->image.size);
    if (side->memory == NULL ||
        !device_write(device, side->memory, problem->image.bytes, problem->image.size)) {
        return false;
    }
    place_image(side->memory, &problem->image);
    side->stream = device_stream_create(device);
    problem_bind(problem, &side->binding, side->memory, problem->image.bytes, device->device);
    side->binding.attend.instance = backend->instance;
    side->binding.attend.stream = side->stream;
    side->binding.write.instance = backend->instance;
    side->binding.write.stream = side->stream;
    side->binding.write_context.instance = backend->instance;
    side->binding.write_context.stream = side->stream;
    return true;
}

void side_loosen(struct side *side, const struct problem *problem)
{
    struct attn_batch *batch = &side->binding.batch;
    struct loose_lengths *loose = &side->loose;
    int32_t row = problem->first_row, longest = 0;
    if (problem->v[FACTOR_LENGTHS].a != LENGTHS_HOST_BOUNDS) {
        return;
    }
    for (int32_t r = 0; r < problem->num_reqs; r++) {
        const struct request *request = &problem->requests[r];
        int32_t rows = request->query_len;
        if (problem->phase == ATTN_PHASE_PREFILL) { /* one of them beyond what few rows are */
            rows += r == problem->num_reqs / 2 ? PROBLEM_LOOSE_ROWS - PROBLEM_MAX_REQS : 1;
        }
        loose->starts[r] = row;
        loose->lens[r] = request->seq_len + (r % 2 == 0 ? PROBLEM_LOOSE_KEYS : 0);
        longest = rows > longest ? rows : longest;
        row += rows;
    }
    loose->starts[problem->num_reqs] = row;
    batch->flags |= ATTN_BATCH_HOST_BOUNDS;
    batch->query_start_loc_host = loose->starts;
    batch->seq_lens_host = loose->lens;
    batch->encoder_seq_lens_host = batch->encoder_seq_lens != NULL ? loose->lens : NULL;
    batch->num_actual_tokens = row;
    batch->max_query_len = longest;
}

static attn_status take_plan_memory(struct side *side, const struct attn_schedule_size *size,
                                    struct attn_error *error)
{
    attn_status status = plan_memory_init(&side->plan, side->device, size);
    if (status == ATTN_ERROR_OUT_OF_MEMORY) {
        snprintf(error->field, sizeof error->field, "schedule_size");
        snprintf(error->message, sizeof error->message,
                 "attn-check found no %zu bytes on the host and %zu on the device for it",
                 size->host_bytes, size->device_bytes + size->scratch_bytes);
    }
    plan_memory_bind(&side->plan, &side->binding.attend);
    side->binding.attend.limits = &side->limits;
    return status;
}

attn_status side_prepare(struct side *side, const struct problem *problem, int32_t factor,
                         struct attn_error *error)
{
    side->limits = (struct attn_limits){sizeof side->limits,
                                        NULL,
                                        problem->num_reqs * factor,
                                        problem->num_tokens * factor,
                                        side->binding.batch.max_query_len * factor,
                                        side->binding.batch.max_seq_len * factor,
                                        (int32_t)problem->table_stride * factor,
                                        0};
    struct attn_schedule_size size = {.struct_size = sizeof size};
    attn_status status = planned_prepare(&side->backend->kernels, &side->binding.attend,
                                         &side->limits, &size, error);
    side->prepared = side->binding.attend.prepared;
    side->plan_state = side->binding.attend.plan_state;
    return status == ATTN_OK ? take_plan_memory(side, &size, error) : status;
}

attn_status side_plan(struct side *side, int32_t mode, struct attn_error *error)
{
    struct attn_attend_args args = side->binding.attend;
    args.q = args.k = args.v = args.out = args.lse = NULL;
    if (side->backend->kernels.schedule == NULL) {
        return ATTN_OK;
    }
    return side->backend->kernels.schedule(&args, mode, error);
}

attn_status side_shorten(struct side *side, const struct problem *problem, int32_t *lengths)
{
    struct attn_batch *batch = &side->binding.batch;
    for (int32_t r = 0; r < problem->num_reqs; r++) {
        const struct request *request = &problem->requests[r];
        bool longer = request->seq_len > request->query_len && problem->shared == 0;
        lengths[r] = request->seq_len - longer;
    }
    if (!problem->paged) {
        return ATTN_OK;
    }
    batch->seq_lens_host = batch->seq_lens_host != NULL ? lengths : NULL;
    batch->encoder_seq_lens_host = batch->encoder_seq_lens_host != NULL ? lengths : NULL;
    bool written = device_write(side->device, side->memory + problem->at.seq_lens, lengths,
                                (size_t)problem->num_reqs * sizeof *lengths);
    return written ? ATTN_OK : ATTN_ERROR_DEVICE;
}

attn_status side_restore(struct side *side, const struct problem *problem)
{
    struct attn_batch *batch = &side->binding.batch;
    const uint8_t *lengths = problem->image.bytes + problem->at.seq_lens;
    const int32_t *host =
        batch->flags & ATTN_BATCH_HOST_BOUNDS ? side->loose.lens : (const int32_t *)lengths;
    uint8_t drained, *seq_lens = side->memory + problem->at.seq_lens;
    if (!problem->paged) {
        return ATTN_OK;
    }
    batch->seq_lens_host = batch->seq_lens_host != NULL ? host : NULL;
    batch->encoder_seq_lens_host = batch->encoder_seq_lens_host != NULL ? host : NULL;
    bool ok =
        device_read(side->device, &drained, seq_lens, 1) &&
        device_write(side->device, seq_lens, lengths, (size_t)problem->num_reqs * sizeof(int32_t));
    return ok ? ATTN_OK : ATTN_ERROR_DEVICE;
}

attn_status side_plan_shorter(struct side *side, const struct problem *problem, int32_t mode,
                              struct attn_error *error)
{
    int32_t lengths[PROBLEM_MAX_REQS];
    attn_status status = side_shorten(side, problem, lengths);
    status = status == ATTN_OK ? side_plan(side, mode, error) : status;
    attn_status restored = side_restore(side, problem);
    return status != ATTN_OK ? status : restored;
}

attn_status side_write(struct side *side, const struct problem *problem, struct attn_error *error)
{
    bool fused = !(side->binding.attend.flags & ATTN_RUN_NO_WRITE);
    if (!problem->paged || fused || side->backend->kernels.write_kv == NULL) {
        return ATTN_OK;
    }
    return side->backend->kernels.write_kv(&side->binding.write, error);
}

attn_status side_attend(struct side *side, struct attn_error *error)
{
    return side->backend->kernels.attend(&side->binding.attend, error);
}

/* The reference fills the cache's context in the initial image, so that both sides start from the
 * same bytes. */
static attn_status write_context(struct backend *reference, struct problem *problem,
                                 struct attn_error *error)
{
    static const struct device host = {.device = {ATTN_DEVICE_CPU, 0}};
    struct side side;
    attn_status status = ATTN_ERROR_OUT_OF_MEMORY;
    if (!problem->paged) {
        return ATTN_OK;
    }
    if (side_init(&side, reference, &host, problem)) {
        status = reference->kernels.write_kv(&side.binding.write_context, error);
        memcpy(problem->image.bytes, side.memory, problem->image.size);
    }
    side_finish(&side);
    return status;
}

attn_status side_run_reference(struct side *reference, const struct problem *problem,
                               struct attn_error *error)
{
    attn_status status = side_prepare(reference, problem, 1, error);
    reference->binding.attend.flags = ATTN_RUN_NO_WRITE;
    if (status == ATTN_OK && problem->paged) {
        status = reference->backend->kernels.write_kv(&reference->binding.write, error);
    }
    status = status == ATTN_OK ? side_plan(reference, ATTN_PLAN_EAGER, error) : status;
    return status == ATTN_OK ? side_attend(reference, error) : status;
}

bool side_guards_whole(struct side *side)
{
    return plan_memory_guards_whole(&side->plan, side->device);
}

enum trial_result sides_init(struct sides *sides, struct trial *trial,
                             const struct case_space *space, const struct attend_case *c,
                             uint64_t seed)
{
    static const struct device host = {.device = {ATTN_DEVICE_CPU, 0}};
    struct attn_error error = ATTN_ERROR_INIT;
    sides->reference = (struct side){.device = &host};
    sides->tested = (struct side){.device = trial->device};
    if (!problem_init(&sides->problem, space, c, seed)) {
        return trial_say(trial, TRIAL_FAILED, "no memory for the case");
    }
    attn_status status = write_context(trial->reference, &sides->problem, &error);
    if (status != ATTN_OK) {
        return trial_call_failed(trial, "reference write_kv", status, &error);
    }
    return side_init(&sides->reference, trial->reference, &host, &sides->problem) &&
                   side_init(&sides->tested, trial->tested, trial->device, &sides->problem)
               ? TRIAL_PASSED
               : trial_say(trial, TRIAL_FAILED, "no memory for the case");
}

void sides_finish(struct sides *sides)
{
    side_finish(&sides->tested);
    side_finish(&sides->reference);
    problem_finish(&sides->problem);
}
