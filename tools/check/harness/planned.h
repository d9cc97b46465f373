/* SPDX-License-Identifier: Apache-2.0 */
/* One kernel as the core calls it: prepare, schedule_size, plan, the kernel, release. The plan's
 * memory is exactly as large as asked for, with guards after its parts. */
#ifndef CHECK_PLANNED_H
#define CHECK_PLANNED_H

#include "harness/backend.h"
#include "common/device.h"
#include "support/client.h"

struct plan_memory {
    struct attn_schedule_size size;
    uint8_t *host, *device, *scratch; /* scratch is device memory, too */
};

/* `bytes` of the device's memory, poisoned, with a guard past its end that has to stay whole; named
 * `name` where an address lies next to it. guarded_free is due whatever *status becomes. */
uint8_t *guarded_alloc(const struct device *device, size_t bytes, const char *name,
                       attn_status *status);
void guarded_free(const struct device *device, uint8_t *memory); /* accepts NULL */
bool guarded_whole(const struct device *device, const uint8_t *memory, size_t bytes);

/* On failure plan_memory_finish is due, too. */
attn_status plan_memory_init(struct plan_memory *memory, const struct device *device,
                             const struct attn_schedule_size *size);
void plan_memory_finish(struct plan_memory *memory, const struct device *device);
/* Into the arguments of the plan's calls, with the sizes. */
void plan_memory_bind(const struct plan_memory *memory, struct attn_attend_args *args);
bool plan_memory_guards_whole(const struct plan_memory *memory, const struct device *device);

typedef attn_status planned_kernel(const struct attn_attend_args *args, struct attn_error *error);

/* All of it for `args`, whose `prepared`, schedule_host, workspace and limits are set here; done on
 * return. A write past the plan's memory and, on a CPU, memory taken in a step are
 * ATTN_ERROR_PLUGIN. */
attn_status planned_call(struct backend *backend, const struct device *device,
                         const struct attn_limits *limits, struct attn_attend_args *args,
                         planned_kernel *kernel, struct attn_error *error);

#endif
