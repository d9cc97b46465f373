/* SPDX-License-Identifier: Apache-2.0 */
/* The devices, as NVML tells them: no CUDA context and no cuInit. */
#ifndef CUDA_FLASH_NVML_H
#define CUDA_FLASH_NVML_H

#include <stdint.h>

struct nvml_device {
    char name[96];
    int32_t major, minor, num_sms;
    int64_t memory_bytes;
};

/* Number of devices written, at most `room`; 0: none, and *cause says why. */
int32_t nvml_devices(struct nvml_device *devices, int32_t room, const char **cause);

#endif
