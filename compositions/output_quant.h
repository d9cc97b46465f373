/* SPDX-License-Identifier: Apache-2.0 */
/* Outputs that are quantized behind the calls that make them. */
#ifndef COMPOSITIONS_OUTPUT_QUANT_H
#define COMPOSITIONS_OUTPUT_QUANT_H

#include "step/plan_state.h"

/* Runs `inner` with an output of plain rows at `place` of the workspace, then quantizes these in
 * the layer's form to the run's own. */
attn_status output_quantized(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                             size_t place, step_program *inner, struct attn_error *error);

#endif
