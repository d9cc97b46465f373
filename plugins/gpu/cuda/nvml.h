/* SPDX-License-Identifier: Apache-2.0 */
/* What NVML reports about GPUs; needs no CUDA context. */
#ifndef GPU_CUDA_NVML_H
#define GPU_CUDA_NVML_H

#include "gpu/host/backend.h"

/* Lists the devices that a CUDA program in this process would see, in CUDA's order; reads
 * CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER as the driver does. Returns their number; if 0,
 * `cause` says why. A uuid is "GPU-..." or, of a MIG slice, "MIG-...". */
int32_t nvml_devices(struct gpu_found *devices, int32_t room, const char **cause);

#endif
