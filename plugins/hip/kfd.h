/* SPDX-License-Identifier: Apache-2.0 */
/* The machine's AMD GPUs by the kernel driver's topology in sysfs. Nothing is opened but files: the
 * runtime stays uninitialised, so that a process may fork after a probe. */
#ifndef HIP_KFD_H
#define HIP_KFD_H

#include "gpu/host/backend.h"

/* Fills devices in the order and number in which the runtime counts them, with arch as gfx942 and
 * uuid as ROCR_VISIBLE_DEVICES takes it; 0: none, and `cause` says why. */
int32_t kfd_devices(struct gpu_found *devices, int32_t room, const char **cause);

#endif
