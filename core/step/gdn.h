/* SPDX-License-Identifier: Apache-2.0 */
/* GDN in a plan: one call of gated_delta over all requests, or one a phase where two backends serve
 * them. */
#ifndef CORE_STEP_GDN_H
#define CORE_STEP_GDN_H

#include "step/schedule.h"

void gdn_describe(struct step *step);
attn_status gdn_make_views(attn_plan *plan, struct attn_error *error);
void gdn_choose_calls(attn_plan *plan, struct step *step);
extern step_check gdn_check_io;

#endif
