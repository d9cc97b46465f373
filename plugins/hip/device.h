/* SPDX-License-Identifier: Apache-2.0 */
/* What device.c has for this plugin alone: its own kernels. */
#ifndef HIP_DEVICE_H
#define HIP_DEVICE_H

#include "attend_list.h"
#include "gpu/params.h"

/* Whether the device's code has the attend for queries and caches of these dtypes, heads padded to
 * this size and the schedule's items. */
bool hip_has_attend(const struct gpu_device *device, const struct gpu_params *p, int32_t size);
/* Whether it has any. */
bool hip_has_attends(const struct gpu_device *device);
/* Launches it over p->schedule.ctas groups. NULL or the cause of a failure. */
const char *hip_launch_attend(const struct gpu_device *device, const struct gpu_params *p,
                              int32_t size, void *stream);

#endif
