/* SPDX-License-Identifier: Apache-2.0 */
/* One kernel as the core calls it: prepare, schedule_size, plan, the kernel, release. The plan's
 * memory is exactly as large as asked for, with guards behind its parts. */
#ifndef CHECK_PLANNED_H
#define CHECK_PLANNED_H

#include "harness/backend.h"
#include "common/device.h"

struct plan_memory {
    size_t host_bytes, device_bytes, scratch_bytes;
    uint8_t *host;
    uint8_t *device;
    uint8_t *scratch; /* of the device, too */
};

/* On failure plan_memory_finish is due, too. */
attn_status plan_memory_init(struct plan_memory *memory, const struct device *device,
                             const struct attn_schedule_size *size);
void plan_memory_finish(struct plan_memory *memory, const struct device *device);
/* Into the arguments of the plan's calls, with the sizes. */
void plan_memory_bind(const struct plan_memory *memory, struct attn_attend_args *args);
bool plan_memory_guards_whole(const struct plan_memory *memory, const struct device *device);

/* prepare, into call->prepared, create_plan_state, into call->plan_state, and schedule_size as the
 * core asks them for such a call; what the backend leaves out is left as it is. planned_release
 * drops what they made. */
attn_status planned_prepare(const struct attn_kernels *kernels, struct attn_attend_args *call,
                            const struct attn_limits *limits, struct attn_schedule_size *size,
                            struct attn_error *error);

void planned_release(const struct attn_kernels *kernels, const struct attn_attend_args *call);

typedef attn_status planned_kernel(const struct attn_attend_args *args, struct attn_error *error);

/* All of it for `args`, whose `prepared`, schedule_host, workspace and limits are set here; done on
 * return. A write past the plan's memory and, on a CPU, memory taken in a step are
 * ATTN_ERROR_PLUGIN. */
attn_status planned_call(struct backend *backend, const struct device *device,
                         const struct attn_limits *limits, struct attn_attend_args *args,
                         planned_kernel *kernel, struct attn_error *error);

#endif
