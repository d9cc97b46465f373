/* SPDX-License-Identifier: Apache-2.0 */
/* A multimodal encoder in fp8: scales from the largest values of the last steps, q, k and v
 * quantized into the workspace (q and k padded with zeros), and one attend over them. On a CPU. */
#ifndef CORE_STEP_ENCODER_H
#define CORE_STEP_ENCODER_H

#include "step/schedule.h"

/* A plan without such layers passes through unchanged. */
size_t encoder_lay_out(attn_plan *plan, size_t at);

extern step_program run_encoder;

#endif
