/* SPDX-License-Identifier: Apache-2.0 */
/* Steps of two parts: some keys, which all tokens see, and what is left of the layer, merged by
 * log-sum-exp. */
#ifndef COMPOSITIONS_MERGED_H
#define COMPOSITIONS_MERGED_H

#include "step/plan_state.h"

/* Rows up to end_row, from where the run before ended. */
struct merge_run {
    int32_t end_row;
    int32_t with_prefix; /* 1: both parts; 0: what is left, as it is */
};

/* All tokens of the step as one request, not causal. Takes 2 integers of the plan. */
void merged_view(attn_plan *plan, struct attn_batch *view);

/* Limits of a part that sees up to `tokens` tokens of a step as one request. */
void merged_limit(struct attn_limits *limits, int32_t tokens);

/* `first` attends into the workspace, `rest`, of the step's main calls, into out; then both become
 * one. */
attn_status merged_run(attn_plan *plan, struct step *step, struct launch *first,
                       const struct merge_run *runs, int32_t num_runs, step_program *rest,
                       const struct attn_step_io *io, struct attn_error *error);

/* Runs `inner` with an output of plain rows at `place` of the workspace, then quantizes these in
 * the layer's form to the run's own. */
attn_status output_quantized(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                             size_t place, step_program *inner, struct attn_error *error);

#endif
