/* SPDX-License-Identifier: Apache-2.0 */
#include "merged.h"

void merged_view(attn_plan *plan, struct attn_batch *view)
{
    const struct attn_batch *whole = &plan->given;
    int32_t *start = plan_take(plan, 2);
    *view = *whole;
    start[0] = whole->query_start_loc_host[0];
    start[1] = whole->query_start_loc_host[whole->num_reqs];
    view->num_reqs = 1;
    view_starts(plan, view, start);
    view->max_query_len = start[1] - start[0];
    view_sees_all(view);
}

void merged_limit(struct attn_limits *limits, int32_t tokens)
{
    limits->max_num_reqs = 1;
    limits->max_num_tokens = tokens < limits->max_num_tokens ? tokens : limits->max_num_tokens;
    limits->max_query_len = limits->max_num_tokens;
}

void merged_use(struct step *step, struct launch *part, const struct attn_batch *view,
                step_program *rest)
{
    step->apart = launch_use(part, view);
    step->rest = rest;
    step->merges = NULL;
    step->num_merges = 1;
    step->program = merged_run;
}

attn_status merged_run(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                       struct attn_error *error)
{
    const struct merge_run whole = {plan->given.num_actual_tokens, 1};
    const struct merge_run *runs = step->merges != NULL ? step->merges : &whole;
    struct launch *first = step->apart;
    const struct attn_tensor like = tensor_like(plan, &step->out);
    struct own_tensor out, lse[2];
    tensor_set_rows(&out, &like, plan->scratch + plan->layout.out, plan->num_tokens,
                    step->out.heads, step->out.head_size);
    for (int32_t i = 0; i < 2; i++) {
        tensor_set_lse(&lse[i], &like, plan->scratch + plan->layout.lse[i], step->out.heads,
                       plan->num_tokens);
    }
    struct attn_step_io part = *io;
    part.k = first->args.k;
    part.v = first->args.v;
    part.out = &out.tensor;
    part.lse = &lse[0].tensor;
    TRY(launch_run(first, &part, error));
    part = *io;
    part.lse = &lse[1].tensor;
    TRY(step->rest(plan, step, &part, error));
    const struct part_result prefix = {&out.tensor, &lse[0].tensor};
    int64_t row = plan->first_row;
    for (int32_t i = 0; i < step->num_merges; i++) {
        const int64_t rows = runs[i].end_row - row;
        TRY(step_merge(step, prefix, (struct part_result){io->out, part.lse},
                       (struct part_result){io->out, io->lse},
                       (struct merge_rows){row, rows, runs[i].with_prefix ? rows : 0}, io->stream,
                       error));
        row = runs[i].end_row;
    }
    return ATTN_OK;
}
