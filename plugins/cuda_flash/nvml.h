/* SPDX-License-Identifier: Apache-2.0 */
/* What the management library tells about GPUs, without any CUDA context. */
#ifndef CUDA_FLASH_NVML_H
#define CUDA_FLASH_NVML_H

#include <stdint.h>

#define NVML_MAX_DEVICES 64

struct nvml_device {
    char name[96];
    char uuid[96]; /* "GPU-..." or, of a slice of one, "MIG-..." */
    int32_t major, minor, num_sms;
    int64_t memory_bytes;
};

/* The devices that a CUDA program of this process would see, in CUDA's order: CUDA_VISIBLE_DEVICES
 * and CUDA_DEVICE_ORDER are read as the driver reads them. How many; 0: `cause` says why. */
int32_t nvml_devices(struct nvml_device *devices, int32_t room, const char **cause);

#endif
