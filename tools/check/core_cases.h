/* SPDX-License-Identifier: Apache-2.0 */
/* What has to be refused: layers that the backend does not declare, and malformed arguments. Both
 * come through the core, which checks for every backend alike; a refusal names the field. */
#ifndef CHECK_NEGATIVE_H
#define CHECK_NEGATIVE_H

#include "core.h"
#include "kernels.h"

struct negative_sink {
    struct core *core;
    const struct case_space *space;
    const struct kernel_sink *cases;
};

void undeclared_cases(const struct negative_sink *sink); /* undeclared.c */
void malformed_cases(const struct negative_sink *sink);  /* malformed.c */

#endif
