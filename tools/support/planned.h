/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of a backend's kernels without the core, as the core makes them for an attend. */
#ifndef SUPPORT_PLANNED_H
#define SUPPORT_PLANNED_H

#include <attn/plugin.h>

/* prepare, into call->prepared, create_plan_state, into call->plan_state, and schedule_size as the
 * core asks them for such a call; what the backend leaves out is left as it is. planned_release
 * drops what they made. */
attn_status planned_prepare(const struct attn_kernels *kernels, struct attn_attend_args *call,
                            const struct attn_limits *limits, struct attn_schedule_size *size,
                            struct attn_error *error);

void planned_release(const struct attn_kernels *kernels, const struct attn_attend_args *call);

#endif
