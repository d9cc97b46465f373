/* SPDX-License-Identifier: Apache-2.0 */
/* What an attend of one layer consists of, by the plan: one or two calls, or parts that are merged.
 */
#include <string.h>

#include "step/schedule.h"
#include "util/error.h"

static inline attn_status launch_run(struct launch *launch, const struct attn_step_io *io,
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
    return status;
}

attn_status run_attends(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                        struct attn_error *error)
{
    attn_status status = ATTN_OK;
    (void)plan;
    for (int32_t i = 0; i < 2 && step->main[i] != NULL && status == ATTN_OK; i++) {
        step->main[i]->args.k = io->k;
        step->main[i]->args.v = io->v;
        status = launch_run(step->main[i], io, io->out, io->lse, error);
    }
    return status;
}

/* Tensors over the workspace for one side of a merge. */
struct partial {
    struct attn_tensor out, lse[2];
    int64_t shape[3], strides[3], lse_shape[2], lse_strides[2];
};

static void partial_init(struct partial *p, attn_plan *plan, const struct step *step)
{
    int64_t tokens = plan->num_tokens;
    p->shape[0] = tokens;
    p->shape[1] = step->out.heads;
    p->shape[2] = step->out.head_size;
    p->strides[0] = step->out.heads * step->out.head_size;
    p->strides[1] = step->out.head_size;
    p->strides[2] = 1;
    p->lse_shape[0] = step->out.heads;
    p->lse_shape[1] = tokens;
    p->lse_strides[0] = tokens;
    p->lse_strides[1] = 1;
    p->out = (struct attn_tensor){plan->workspace + plan->scratch.out,
                                  plan->model->device,
                                  3,
                                  {0, 0, 0},
                                  p->shape,
                                  p->strides,
                                  0};
    tensor_set_kind(&p->out, step->out.kind);
    for (int32_t i = 0; i < 2; i++) {
        p->lse[i] = (struct attn_tensor){plan->workspace + plan->scratch.lse[i],
                                         plan->model->device,
                                         2,
                                         {ATTN_CODE_FLOAT, 32, 1},
                                         p->lse_shape,
                                         p->lse_strides,
                                         0};
    }
}

/* `first` attends into the workspace, the layer itself into out; then both become one. */
static attn_status run_merged(attn_plan *plan, struct step *step, struct launch *first,
                              const struct attn_step_io *io, struct attn_error *error)
{
    struct partial partial;
    attn_status status;
    partial_init(&partial, plan, step);
    status = launch_run(first, io, &partial.out, &partial.lse[0], error);
    for (int32_t i = 0; i < 2 && step->main[i] != NULL && status == ATTN_OK; i++) {
        step->main[i]->args.k = io->k;
        step->main[i]->args.v = io->v;
        status = launch_run(step->main[i], io, io->out, &partial.lse[1], error);
    }
    if (status != ATTN_OK) {
        return status;
    }
    struct attn_merge_states_args args = {.struct_size = sizeof args,
                                          .instance = first->args.instance,
                                          .stream = io->stream,
                                          .prefix_out = &partial.out,
                                          .prefix_lse = &partial.lse[0],
                                          .suffix_out = io->out,
                                          .suffix_lse = &partial.lse[1],
                                          .out = io->out,
                                          .lse = io->lse};
    const struct merge_run whole = {plan->given.num_actual_tokens, 1};
    bool all = first == &step->launches[ATTN_PHASE_PREFILL][PART_PREFIX];
    const struct merge_run *runs = all ? &whole : plan->merge_runs;
    int64_t row = plan->first_row;
    for (int32_t i = 0; i < (all ? 1 : plan->num_merge_runs) && status == ATTN_OK; i++) {
        args.first_row = row;
        args.num_rows = runs[i].end_row - row;
        args.num_rows_with_prefix = runs[i].with_prefix ? args.num_rows : 0;
        status = step->merge(&args, error);
        row = runs[i].end_row;
    }
    return status;
}

attn_status run_cascade(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                        struct attn_error *error)
{
    return run_merged(plan, step, &step->launches[ATTN_PHASE_PREFILL][PART_PREFIX], io, error);
}

attn_status run_with_sink(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                          struct attn_error *error)
{
    return run_merged(plan, step, &step->launches[ATTN_PHASE_PREFILL][PART_SINK], io, error);
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
            status = instance->kernels.fill(instance->handle, head, 0, (size_t)(dims * element),
                                            (size_t)(row_stride * element), rows, stream, error);
        } else if (plan->model->device.type == ATTN_DEVICE_CPU) {
            for (int64_t i = 0; i < rows; i++) {
                memset(head + i * row_stride * element, 0, (size_t)(dims * element));
            }
        } else {
            status = error_set_text(error, ATTN_ERROR_UNSUPPORTED, "fill",
                                    "an idle step needs the backend's fill kernel");
        }
    }
    return status;
}

/* Idle: zeros. Profiling: zeros, and the whole workspace is touched. Any other batch comes here
 * without a row to compute, and leaves out as it is. */
attn_status run_idle(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                     struct attn_error *error)
{
    int32_t mode = plan->given.mode;
    if (mode != ATTN_BATCH_IDLE && mode != ATTN_BATCH_PROFILE) {
        return ATTN_OK;
    }
    attn_status status =
        io->out != NULL ? zero_tensor(plan, step, io->out, io->stream, error) : ATTN_OK;
    if (status == ATTN_OK && mode == ATTN_BATCH_PROFILE && plan->scratch.bytes > 0) {
        int64_t shape[3] = {1, 1, (int64_t)plan->scratch.bytes};
        struct attn_tensor workspace = {
            plan->workspace, plan->model->device, 3, {ATTN_CODE_UINT, 8, 1}, shape, NULL, 0};
        status = zero_tensor(plan, step, &workspace, io->stream, error);
    }
    return status;
}
