/* SPDX-License-Identifier: Apache-2.0 */
/* Programs of the steps of layers without a composition: one call, two or none. And the error of an
 * operation that fails. */
#include <stdio.h>
#include <string.h>

#include "step/plan_state.h"

/* What a kernel has left becomes clean text after `words`, as far as it goes. */
attn_status operation_failed(const char *words, attn_status status, struct attn_error *error)
{
    char field[ATTN_ERROR_FIELD_SIZE], message[ATTN_ERROR_MESSAGE_SIZE];
    status = error_relay(error, status, error);
    if (error == NULL || error->struct_size < sizeof *error) {
        return status;
    }
    memcpy(field, error->field, sizeof field);
    memcpy(message, error->message, sizeof message);
    return error_set(error, status, field, "%s: %s", words, message);
}

attn_status step_fail(const struct step *step, attn_status status, struct attn_error *error)
{
    const char *prefill = step->layer->served[ATTN_PHASE_PREFILL].instance->caps->name;
    const char *decode = step->layer->served[ATTN_PHASE_DECODE].instance->caps->name;
    const bool two = decode != prefill;
    char words[ATTN_ERROR_MESSAGE_SIZE];
    snprintf(words, sizeof words, "layer '%s', %s%s%s", step->layer->desc->name, prefill,
             two ? " and " : "", two ? decode : "");
    return operation_failed(words, status, error);
}

const char *launch_name(const struct launch *launch)
{
    static const char *const names[PART_COUNT] = {
        "attend",          "attend prefix",  "attend rest",      "attend sink",
        "attend new keys", "attend context", "attend compressed"};
    return names[launch->schedule->part];
}

attn_status launch_run(struct launch *launch, const struct attn_step_io *io,
                       struct attn_error *error)
{
    struct attn_attend_args *args = &launch->args;
    args->next = io->next;
    args->stream = io->stream;
    args->q = io->q;
    args->k = io->k;
    args->v = io->v;
    args->out = io->out;
    args->lse = io->lse;
    attn_status status = launch->kernel(args, error);
    args->next = NULL; /* plain runs expect neither */
    args->lse = NULL;
    return operation(launch_name(launch), status, error);
}

attn_status step_merge(const struct step *step, struct part_result prefix,
                       struct part_result suffix, struct part_result to, struct merge_rows rows,
                       void *stream, struct attn_error *error)
{
    const struct attn_merge_states_args args = KERNEL_ARGS(
        step_instance(step), stream, .prefix_out = prefix.out, .prefix_lse = prefix.lse,
        .suffix_out = suffix.out, .suffix_lse = suffix.lse, .out = to.out, .lse = to.lse,
        .first_row = rows.first, .num_rows = rows.count, .num_rows_with_prefix = rows.with_prefix);
    return operation("merge", step_instance(step)->kernels.merge_states(&args, error), error);
}

attn_status run_attends(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                        struct attn_error *error)
{
    for (int32_t i = 0; i < 2 && step->main[i] != NULL; i++) {
        TRY(launch_run(step->main[i], io, error));
    }
    return ATTN_OK;
}

attn_status run_nothing(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                        struct attn_error *error)
{
    return ATTN_OK;
}

attn_status zero_tensor(attn_plan *plan, const struct step *step, const struct attn_tensor *tensor,
                        void *stream, struct attn_error *error)
{
    const struct instance *instance = step_instance(step);
    int64_t rows = tensor->shape[0], heads = tensor->ndim > 1 ? tensor->shape[1] : 1;
    int64_t element = tensor->dtype.bits / 8;
    int64_t dims = tensor->ndim > 2 ? tensor->shape[2] : 1;
    int64_t row_stride = tensor_stride(tensor, 0), head_stride = tensor_stride(tensor, 1);
    uint8_t *data = tensor_data(tensor);
    struct attn_fill_args args = KERNEL_ARGS(
        instance, stream, .row_bytes = (size_t)(dims * element),
        .stride = (size_t)(row_stride * element), .rows = rows, .value = step->idle_byte);
    ERROR_IF(instance->kernels.fill == NULL, ATTN_ERROR_UNSUPPORTED, "fill",
             "an idle step needs the backend's fill kernel");
    for (int64_t h = 0; h < heads; h++) {
        args.destination = data + h * head_stride * element;
        TRY(instance->kernels.fill(&args, error));
    }
    return ATTN_OK;
}

/* Idle: zeros, or an indexer's -1. Profiling: the same, and the whole workspace is touched. Any
 * other batch comes here without a row to compute, and leaves out as it is. */
attn_status run_idle(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                     struct attn_error *error)
{
    int32_t mode = plan->given.mode;
    if (mode != ATTN_BATCH_IDLE && mode != ATTN_BATCH_PROFILE) {
        return ATTN_OK;
    }
    TRY_IF(io->out != NULL, zero_tensor(plan, step, io->out, io->stream, error));
    const size_t bytes[] = {plan->layout.own_bytes, plan->layout.scratch_bytes};
    for (int32_t i = 0; i < 2 && mode == ATTN_BATCH_PROFILE; i++) {
        int64_t shape[3] = {1, 1, (int64_t)bytes[i]};
        void *data = i == 0 ? plan->workspace : plan->scratch;
        const struct attn_tensor part = {
            data, plan->model->device, 3, {ATTN_CODE_UINT, 8, 1}, shape};
        TRY_IF(bytes[i] > 0, zero_tensor(plan, step, &part, io->stream, error));
    }
    return ATTN_OK;
}
