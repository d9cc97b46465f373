/* SPDX-License-Identifier: Apache-2.0 */
/* Steps of two parts: some keys, which all tokens see, and what is left of the layer, merged by
 * log-sum-exp. */
#ifndef COMPOSITIONS_MERGED_H
#define COMPOSITIONS_MERGED_H

#include "step/plan_state.h"

/* All tokens of the step as one request, not causal. Takes 2 integers of the plan. */
void merged_view(attn_plan *plan, struct attn_batch *view);

/* Limits of a part that sees up to `tokens` tokens of a step as one request. */
void merged_limit(struct attn_limits *limits, int32_t tokens);

/* step->apart attends into the workspace, step->rest into out; then both become one. */
extern step_program merged_run;
/* The step's program is merged_run of `part` over `view` and of `rest`, all rows having both. */
void merged_use(struct step *step, struct launch *part, const struct attn_batch *view,
                step_program *rest);

/* Runs `inner` with an output of plain rows at `place` of the workspace, then quantizes these in
 * the layer's form to the run's own. */
attn_status output_quantized(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                             size_t place, step_program *inner, struct attn_error *error);

#endif
