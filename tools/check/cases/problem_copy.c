/* SPDX-License-Identifier: Apache-2.0 */
#include "cases/problem_copy.h"

#include <string.h>

#include "common/command.h"
#include "support/client.h"

void problem_copy_finish(struct problem_copy *copy)
{
    if (copy->backend != NULL) {
        planned_release(&copy->backend->kernels, &copy->binding.attend);
    }
    buffers_forget(copy->memory);
    device_free(copy->device, copy->memory);
    plan_memory_finish(&copy->plan, copy->device);
    device_stream_destroy(copy->device, copy->stream);
}

bool problem_copy_init(struct problem_copy *copy, struct backend *backend,
                       const struct device *device, const struct check_problem *problem)
{
    memset(copy, 0, sizeof *copy);
    copy->problem = problem;
    copy->backend = backend;
    copy->device = device;
    copy->memory = device_alloc(device, problem->image.size);
    if (copy->memory == NULL ||
        !device_write(device, copy->memory, problem->image.bytes, problem->image.size)) {
        return false;
    }
    buffers_add(copy->memory, &problem->image, 0, NULL);
    copy->stream = device_stream_create(device);
    problem_bind(problem, &copy->binding, copy->memory, problem->image.bytes, device->device);
    copy->binding.attend.instance = backend->instance;
    copy->binding.attend.stream = copy->stream;
    copy->binding.write.instance = backend->instance;
    copy->binding.write.stream = copy->stream;
    copy->binding.write_context.instance = backend->instance;
    copy->binding.write_context.stream = copy->stream;
    return true;
}

void problem_copy_loosen(struct problem_copy *copy)
{
    const struct check_problem *problem = copy->problem;
    struct attn_batch *batch = &copy->binding.batch;
    struct loose_lengths *loose = &copy->loose;
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

static attn_status take_plan_memory(struct problem_copy *copy,
                                    const struct attn_schedule_size *size, struct attn_error *error)
{
    attn_status status = plan_memory_init(&copy->plan, copy->device, size);
    if (status == ATTN_ERROR_OUT_OF_MEMORY) {
        command_error(error, status, "schedule_size",
                      "attn-check found no %zu bytes on the host and %zu on the device for it",
                      size->host_bytes, size->device_bytes + size->scratch_bytes);
    }
    plan_memory_bind(&copy->plan, &copy->binding.attend);
    copy->binding.attend.limits = &copy->limits;
    return status;
}

attn_status problem_copy_prepare(struct problem_copy *copy, int32_t factor,
                                 struct attn_error *error)
{
    const struct check_problem *problem = copy->problem;
    copy->limits = client_limits(problem->num_reqs * factor, problem->num_tokens * factor,
                                 copy->binding.batch.max_query_len * factor,
                                 copy->binding.batch.max_seq_len * factor,
                                 (int32_t)problem->table_stride * factor);
    struct attn_schedule_size size = {.struct_size = sizeof size};
    attn_status status = planned_prepare(&copy->backend->kernels, &copy->binding.attend,
                                         &copy->limits, &size, error);
    return status == ATTN_OK ? take_plan_memory(copy, &size, error) : status;
}

attn_status problem_copy_plan(struct problem_copy *copy, int32_t mode, struct attn_error *error)
{
    struct attn_attend_args args = copy->binding.attend;
    args.q = args.k = args.v = args.out = args.lse = NULL;
    if (copy->backend->kernels.schedule == NULL) {
        return ATTN_OK;
    }
    return copy->backend->kernels.schedule(&args, mode, error);
}

/* Another batch of the same requests: each with a context is one key shorter. `lengths` holds the
 * host's copy until the batch is restored. */
static attn_status shorten(struct problem_copy *copy, int32_t *lengths)
{
    const struct check_problem *problem = copy->problem;
    struct attn_batch *batch = &copy->binding.batch;
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
    bool written = device_write(copy->device, copy->memory + problem->at.seq_lens, lengths,
                                (size_t)problem->num_reqs * sizeof *lengths);
    return written ? ATTN_OK : ATTN_ERROR_DEVICE;
}

/* Undoes shorten once everything that was enqueued since has run. */
static attn_status restore(struct problem_copy *copy)
{
    const struct check_problem *problem = copy->problem;
    struct attn_batch *batch = &copy->binding.batch;
    const uint8_t *lengths = problem->image.bytes + problem->at.seq_lens;
    const int32_t *host =
        batch->flags & ATTN_BATCH_HOST_BOUNDS ? copy->loose.lens : (const int32_t *)lengths;
    uint8_t drained, *seq_lens = copy->memory + problem->at.seq_lens;
    if (!problem->paged) {
        return ATTN_OK;
    }
    batch->seq_lens_host = batch->seq_lens_host != NULL ? host : NULL;
    batch->encoder_seq_lens_host = batch->encoder_seq_lens_host != NULL ? host : NULL;
    bool ok =
        device_read(copy->device, &drained, seq_lens, 1) &&
        device_write(copy->device, seq_lens, lengths, (size_t)problem->num_reqs * sizeof(int32_t));
    return ok ? ATTN_OK : ATTN_ERROR_DEVICE;
}

static attn_status plan_kernels(const struct copy_step *step, int32_t mode,
                                struct attn_error *error)
{
    return problem_copy_plan(step->copy, mode, error);
}

static attn_status run_kernels(const struct copy_step *step, struct attn_error *error)
{
    return problem_copy_attend(step->copy, error);
}

struct copy_step problem_copy_step(struct problem_copy *copy)
{
    return (struct copy_step){copy, plan_kernels, run_kernels};
}

attn_status copy_step_plan_shorter(const struct copy_step *step, int32_t mode,
                                   struct attn_error *error)
{
    int32_t lengths[PROBLEM_MAX_REQS];
    attn_status status = shorten(step->copy, lengths);
    status = status == ATTN_OK ? step->plan(step, mode, error) : status;
    attn_status restored = restore(step->copy);
    return status != ATTN_OK ? status : restored;
}

attn_status copy_step_captured(const struct copy_step *step, bool inside, struct attn_error *error)
{
    struct problem_copy *copy = step->copy;
    void *graph = NULL;
    attn_status status =
        copy_step_plan_shorter(step, inside ? ATTN_PLAN_OUT_OF_GRAPH : ATTN_PLAN_CAPTURE, error);
    bool capturing = status == ATTN_OK && device_capture_begin(copy->device, copy->stream);
    if (status == ATTN_OK && inside) {
        status = step->plan(step, ATTN_PLAN_IN_GRAPH, error);
    }
    status = status == ATTN_OK ? step->run(step, error) : status;
    graph = capturing ? device_capture_end(copy->device, copy->stream) : NULL;
    if (capturing && graph == NULL) {
        status = status == ATTN_OK ? ATTN_ERROR_DEVICE : status;
    }
    if (status == ATTN_OK) {
        status = step->plan(step, inside ? ATTN_PLAN_OUT_OF_GRAPH : ATTN_PLAN_REPLAY, error);
    }
    if (status == ATTN_OK && capturing) {
        bool launched = device_graph_launch(copy->device, graph, copy->stream);
        status = launched ? ATTN_OK : ATTN_ERROR_DEVICE;
    } else if (status == ATTN_OK) {
        status = inside ? step->plan(step, ATTN_PLAN_IN_GRAPH, error) : ATTN_OK;
        status = status == ATTN_OK ? step->run(step, error) : status;
    }
    uint8_t drained; /* the graph may not be destroyed under its own launch */
    device_read(copy->device, &drained, copy->memory, 1);
    device_graph_finish(copy->device, graph);
    return status;
}

#define SHIFT(array, count) one.array += one.array != NULL ? (count) : 0
struct attn_batch batch_of_request(const struct attn_batch *whole, int32_t r)
{
    struct attn_batch one = *whole;
    one.num_reqs = 1;
    one.query_start_loc += r;
    one.query_start_loc_host += r;
    one.num_actual_tokens = one.query_start_loc_host[1];
    SHIFT(seq_lens, r);
    SHIFT(seq_lens_host, r);
    SHIFT(block_table, one.block_table_row != NULL ? 0 : r * one.block_table_stride);
    SHIFT(block_table_row, r);
    SHIFT(key_start_loc, r);
    SHIFT(key_start_loc_host, r);
    SHIFT(encoder_seq_lens, r);
    SHIFT(encoder_seq_lens_host, r);
    SHIFT(causal_per_request, r);
    SHIFT(span_start_loc, r);
    if (one.tree != NULL) {
        one.tree = (const uint32_t *)one.tree + r * one.tree_stride_request;
    }
    return one;
}

bool batch_put_lengths(const struct device *device, const struct attn_batch *one,
                       const int32_t *starts, const int32_t *length)
{
    return device_write(device, (void *)(uintptr_t)one->query_start_loc, starts,
                        2 * sizeof *starts) &&
           device_write(device, (void *)(uintptr_t)one->seq_lens, length, sizeof *length);
}

void batch_part_init(struct batch_part *part, const struct attn_batch *whole, int32_t index,
                     bool halves)
{
    const int32_t r = halves ? index / 2 : index;
    const int32_t *starts = whole->query_start_loc_host + r;
    const int32_t middle = starts[0] + (starts[1] - starts[0]) / 2;
    part->request = r;
    part->starts[0] = halves && index % 2 != 0 ? middle : starts[0];
    part->starts[1] = halves && index % 2 == 0 ? middle : starts[1];
    part->length = whole->seq_lens_host[r] - (starts[1] - part->starts[1]);
    part->batch = batch_of_request(whole, r);
    part->batch.query_start_loc_host = part->starts;
    part->batch.seq_lens_host = &part->length;
    part->batch.num_actual_tokens = part->starts[1];
    part->batch.max_query_len = part->starts[1] - part->starts[0];
}

attn_status problem_copy_write(struct problem_copy *copy, struct attn_error *error)
{
    bool fused = !(copy->binding.attend.flags & ATTN_RUN_NO_WRITE);
    if (!copy->problem->paged || fused || copy->backend->kernels.write_kv == NULL) {
        return ATTN_OK;
    }
    return copy->backend->kernels.write_kv(&copy->binding.write, error);
}

attn_status problem_copy_attend(struct problem_copy *copy, struct attn_error *error)
{
    return copy->backend->kernels.attend(&copy->binding.attend, error);
}

/* The reference fills the cache's context in the initial image, so that both sides start from the
 * same bytes. */
static attn_status write_context(struct backend *reference, struct check_problem *problem,
                                 struct attn_error *error)
{
    struct problem_copy copy;
    attn_status status = ATTN_ERROR_OUT_OF_MEMORY;
    if (!problem->paged) {
        return ATTN_OK;
    }
    if (problem_copy_init(&copy, reference, &device_host, problem)) {
        status = reference->kernels.write_kv(&copy.binding.write_context, error);
        memcpy(problem->image.bytes, copy.memory, problem->image.size);
    }
    problem_copy_finish(&copy);
    return status;
}

attn_status problem_copy_run_reference(struct problem_copy *reference, struct attn_error *error)
{
    attn_status status = problem_copy_prepare(reference, 1, error);
    reference->binding.attend.flags = ATTN_RUN_NO_WRITE;
    if (status == ATTN_OK && reference->problem->paged) {
        status = reference->backend->kernels.write_kv(&reference->binding.write, error);
    }
    status = status == ATTN_OK ? problem_copy_plan(reference, ATTN_PLAN_EAGER, error) : status;
    return status == ATTN_OK ? problem_copy_attend(reference, error) : status;
}

enum trial_result problem_copies_init(struct problem_copies *copies, struct trial *trial,
                                      const struct case_space *space, const struct attend_case *c,
                                      uint64_t seed)
{
    struct attn_error error = ATTN_ERROR_INIT;
    copies->reference = (struct problem_copy){.device = &device_host};
    copies->tested = (struct problem_copy){.device = trial->device};
    problem_init(&copies->problem, space, c, seed);
    TRIAL_CALL(trial, "reference write_kv",
               write_context(trial->reference, &copies->problem, &error), &error);
    return problem_copy_init(&copies->reference, trial->reference, &device_host,
                             &copies->problem) &&
                   problem_copy_init(&copies->tested, trial->tested, trial->device,
                                     &copies->problem)
               ? TRIAL_PASSED
               : trial_say(trial, TRIAL_FAILED, "no memory for the case");
}

void problem_copies_finish(struct problem_copies *copies)
{
    problem_copy_finish(&copies->tested);
    problem_copy_finish(&copies->reference);
    image_finish(&copies->problem.image);
}
