/* SPDX-License-Identifier: Apache-2.0 */
/* Context parallelism of a layer whose cache is spread over ranks: every rank attends the context
 * that it holds with the queries of all ranks' heads, the partial results are exchanged and merged
 * by log-sum-exp, and the step's own keys, which every rank has, are attended apart. */
#ifndef CORE_STEP_PARALLEL_H
#define CORE_STEP_PARALLEL_H

#include "step/schedule.h"

/* A plan without such layers passes through all of them unchanged. */
size_t parallel_lay_out(attn_plan *plan, size_t at);
struct attn_limits parallel_limits(const attn_plan *plan, const attn_layer *layer, int32_t part);
attn_status parallel_init(attn_plan *plan, struct attn_error *error);
void parallel_finish(attn_plan *plan);
attn_status parallel_make_views(attn_plan *plan, struct attn_error *error);
/* Keys of `context` on a rank of those that spread the cache. */
int32_t parallel_local_length(const attn_layer *layer, int32_t context, int32_t rank);
void parallel_choose_calls(attn_plan *plan, struct step *step);

extern step_program run_parallel;

#endif
