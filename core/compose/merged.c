/* SPDX-License-Identifier: Apache-2.0 */
#include "compose/merged.h"

void merged_view(attn_plan *plan, struct attn_batch *view)
{
    const struct attn_batch *whole = &plan->given;
    int32_t *start = plan_take(plan, 2);
    *view = *whole;
    start[0] = whole->query_start_loc_host[0];
    start[1] = whole->query_start_loc_host[whole->num_reqs];
    view->num_reqs = 1;
    view->query_start_loc_host = start;
    view->query_start_loc = plan_on_device(plan, start);
    view->max_query_len = start[1] - start[0];
    view->causal = -1; /* the part's layer is not causal */
    view->causal_per_request = NULL;
    view->tree = NULL;
    view->spans = view->span_start_loc = NULL;
    view->num_spans = 0;
    view->slot_mapping = NULL;
    view->num_slots = 0;
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

attn_status merged_run(attn_plan *plan, struct step *step, struct launch *first,
                       const struct merge_run *runs, int32_t num_runs,
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
    int64_t row = plan->first_row;
    for (int32_t i = 0; i < num_runs && status == ATTN_OK; i++) {
        args.first_row = row;
        args.num_rows = runs[i].end_row - row;
        args.num_rows_with_prefix = runs[i].with_prefix ? args.num_rows : 0;
        status = step->merge(&args, error);
        row = runs[i].end_row;
    }
    return status;
}
