/* SPDX-License-Identifier: Apache-2.0 */
/* Cases through the core next to the attends: steps without work and blocks that move, which give
 * what cpu_ref gives in the same core; composed steps; and what has to be refused, where the core
 * checks for every backend alike and a refusal names the field. */
#ifndef CHECK_CORE_CASES_H
#define CHECK_CORE_CASES_H

#include "core/core.h"
#include "kernels/kernels.h"

void idle_cases(const struct kernel_sink *sink);          /* engine_idle.c */
void blocks_cases(const struct kernel_sink *sink);        /* engine_blocks.c */
void compressed_cases(const struct kernel_sink *sink);    /* engine_compressed.c */
void compressor_cases(const struct kernel_sink *sink);    /* engine_compressor.c */
void engine_output_cases(const struct kernel_sink *sink); /* engine_trial.c */
void undeclared_cases(const struct kernel_sink *sink);    /* undeclared.c */

#endif
