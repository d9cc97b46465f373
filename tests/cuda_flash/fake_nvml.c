/* SPDX-License-Identifier: Apache-2.0 */
/* The calls of NVML that a probe makes, for a machine of three GPUs and one MIG slice: two large
 * ones of capability 9.0 around one of 7.5. FAKE_NVML_GPUS says how many there are. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#pragma GCC visibility push(default) /* the project hides by default */

struct gpu {
    const char *name, *uuid;
    int major, minor;
    unsigned cores;
};
static const struct gpu gpus[] = {
    {"Small", "GPU-11110000-0000", 7, 5, 2560},
    {"Large", "GPU-22220000-0000", 9, 0, 16896},
    {"Large", "GPU-22230000-0000", 9, 0, 16896},
    {"Slice", "MIG-33330000-0000", 9, 0, 2048},
};
static const char *count_text(void)
{
    const char *text = getenv("FAKE_NVML_GPUS");
    return text != NULL ? text : "3";
}

int nvmlInit_v2(void)
{
    return strcmp(count_text(), "broken") == 0 ? 999 : 0;
}
int nvmlShutdown(void)
{
    return 0;
}
int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = (unsigned)atoi(count_text());
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    *device = (void *)(uintptr_t)&gpus[index];
    return index < 3 ? 0 : 2;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    for (unsigned i = 0; i < 4; i++) {
        if (strcmp(gpus[i].uuid, uuid) == 0) {
            *device = (void *)(uintptr_t)&gpus[i];
            return 0;
        }
    }
    return 6;
}
int nvmlDeviceGetUUID(const struct gpu *device, char *uuid, unsigned length)
{
    strncpy(uuid, device->uuid, length);
    return 0;
}
int nvmlDeviceGetName(const struct gpu *device, char *name, unsigned length)
{
    strncpy(name, device->name, length);
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(const struct gpu *device, int *major, int *minor)
{
    *major = device->major;
    *minor = device->minor;
    return 0;
}
int nvmlDeviceGetMemoryInfo(const struct gpu *device, unsigned long long *memory)
{
    memory[0] = 1ull << 34;
    return 0;
}
int nvmlDeviceGetNumGpuCores(const struct gpu *device, unsigned *cores)
{
    *cores = device->cores;
    return 0;
}
