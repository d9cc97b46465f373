/* SPDX-License-Identifier: Apache-2.0 */
/* What a step of a layer without a composition is: one or two calls, or nothing. */
#include <string.h>

#include "step/plan_state.h"
#include "util/error.h"

const char *launch_name(const struct launch *launch)
{
    static const char *const names[PART_COUNT] = {"attend",          "attend prefix",
                                                  "attend rest",     "attend sink",
                                                  "attend new keys", "attend context"};
    return names[launch->schedule->part];
}

attn_status launch_run(struct launch *launch, const struct attn_step_io *io,
                       const struct attn_tensor *out, const struct attn_tensor *lse,
                       struct attn_error *error)
{
    struct attn_attend_args *args = &launch->args;
    args->next = io->next;
    args->stream = io->stream;
    args->q = io->q;
    args->out = out;
    args->lse = lse;
    attn_status status = launch->kernel(args, error);
    args->next = NULL; /* plain runs expect neither */
    args->lse = NULL;
    return operation(launch_name(launch), status, error);
}

attn_status run_attends(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                        struct attn_error *error)
{
    for (int32_t i = 0; i < 2 && step->main[i] != NULL; i++) {
        step->main[i]->args.k = io->k;
        step->main[i]->args.v = io->v;
        TRY(launch_run(step->main[i], io, io->out, io->lse, error));
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
    const struct instance *instance = step->layer->served[ATTN_PHASE_PREFILL].instance;
    int64_t rows = tensor->shape[0], heads = tensor->ndim > 1 ? tensor->shape[1] : 1;
    int64_t element = tensor->dtype.bits / 8;
    int64_t dims = tensor->ndim > 2 ? tensor->shape[2] : 1;
    int64_t head_stride = tensor->strides != NULL ? tensor->strides[1] : dims;
    int64_t row_stride = tensor->strides != NULL ? tensor->strides[0] : heads * dims;
    uint8_t *data = (uint8_t *)tensor->data + tensor->byte_offset;
    attn_status status = ATTN_OK;
    for (int64_t h = 0; h < heads && status == ATTN_OK; h++) {
        uint8_t *head = data + h * head_stride * element;
        if (instance->kernels.fill != NULL) {
            const struct attn_fill_args args = {.struct_size = sizeof args,
                                                .instance = instance->handle,
                                                .stream = stream,
                                                .destination = head,
                                                .row_bytes = (size_t)(dims * element),
                                                .stride = (size_t)(row_stride * element),
                                                .rows = rows,
                                                .value = step->idle_byte};
            status = instance->kernels.fill(&args, error);
        } else if (plan->model->device.type == ATTN_DEVICE_CPU) {
            for (int64_t i = 0; i < rows; i++) {
                memset(head + i * row_stride * element, step->idle_byte, (size_t)(dims * element));
            }
        } else {
            status = error_set_text(error, ATTN_ERROR_UNSUPPORTED, "fill",
                                    "an idle step needs the backend's fill kernel");
        }
    }
    return status;
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
    attn_status status =
        io->out != NULL ? zero_tensor(plan, step, io->out, io->stream, error) : ATTN_OK;
    const size_t bytes[] = {plan->layout.own_bytes, plan->layout.scratch_bytes};
    for (int32_t i = 0; i < 2 && mode == ATTN_BATCH_PROFILE && status == ATTN_OK; i++) {
        int64_t shape[3] = {1, 1, (int64_t)bytes[i]};
        struct attn_tensor part = {i == 0 ? plan->workspace : plan->scratch,
                                   plan->model->device,
                                   3,
                                   {ATTN_CODE_UINT, 8, 1},
                                   shape,
                                   NULL,
                                   0};
        status = bytes[i] > 0 ? zero_tensor(plan, step, &part, io->stream, error) : status;
    }
    return status;
}
