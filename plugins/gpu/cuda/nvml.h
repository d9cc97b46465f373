/* SPDX-License-Identifier: Apache-2.0 */
/* What NVML reports about GPUs; needs no CUDA context. */
#ifndef GPU_CUDA_NVML_H
#define GPU_CUDA_NVML_H

#include <stdint.h>

#define NVML_MAX_DEVICES 64

struct nvml_device {
    char name[96];
    char uuid[96]; /* "GPU-..."; "MIG-..." for a MIG slice */
    int32_t major, minor, num_sms;
    int64_t memory_bytes;
};

/* Lists the devices that a CUDA program in this process would see, in CUDA's order; reads
 * CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER as the driver does. Returns their number; if 0,
 * `cause` says why. */
int32_t nvml_devices(struct nvml_device *devices, int32_t room, const char **cause);

#endif
