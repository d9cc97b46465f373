/* SPDX-License-Identifier: Apache-2.0 */
/* MLA in a plan. Decode: q_nope W_UK, attend_mla, W_UV. Prefill: new keys and chunks of context
 * projected per head, attended and merged; or as decode, where the backend's parts do not allow it,
 * and always if sparse. */
#ifndef CORE_STEP_MLA_H
#define CORE_STEP_MLA_H

#include "step/schedule.h"

/* mla_plan.c. A plan without MLA layers passes through all of them unchanged. */
void mla_describe(struct step *step);
attn_status mla_init(attn_plan *plan, struct attn_error *error);
void mla_finish(attn_plan *plan);
size_t mla_lay_out(attn_plan *plan, size_t at);
int32_t mla_max_integers(const attn_plan *plan);
attn_status mla_make_views(attn_plan *plan, struct attn_error *error);
void mla_choose_calls(attn_plan *plan, struct step *step);
/* The batch of one chunk, over the plan's own arrays. */
void mla_chunk_view(const attn_plan *plan, const struct context_chunk *chunk,
                    struct attn_batch *view);
/* Is this layer's prefill per head? */
bool mla_per_head(const struct step *step);

extern step_program run_mla;    /* mla.c */
extern step_check mla_check_io; /* mla_check.c */

#endif
