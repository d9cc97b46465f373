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
int64_t mla_max_integers(const attn_plan *plan);
attn_status mla_make_views(attn_plan *plan, struct attn_error *error);
void mla_choose_calls(attn_plan *plan, struct step *step);
/* The batch of one chunk, over the plan's own arrays. */
void mla_chunk_view(const attn_plan *plan, const struct context_chunk *chunk,
                    struct attn_batch *view);
/* Is this layer's prefill per head? */
bool mla_per_head(const struct step *step);

/* mla_spread.c: a latent cache that ranks share. The decode view's lengths become this rank's. */
attn_status mla_localise(attn_plan *plan, struct attn_error *error);
/* Rows 0 .. tokens-1 of the latent query and of q_pe against all ranks' rows: the tensor of the
 * latent outputs of this rank's own heads. */
struct over;
attn_status mla_attend_spread(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                              struct launch *launch, const struct attn_io_mla *mla, int64_t tokens,
                              struct over *out, struct attn_error *error);
/* A chunk's rows of this rank to those of all ranks, by request. */
attn_status mla_gather_spread(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                              const struct context_chunk *chunk, struct attn_error *error);

extern step_program run_mla;    /* mla.c */
extern step_check mla_check_io; /* mla_check.c */

#endif
