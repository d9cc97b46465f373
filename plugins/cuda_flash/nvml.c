/* SPDX-License-Identifier: Apache-2.0 */
/* Source of the calls: NVML API Reference, "Initialization and Cleanup" and "Device Queries". */
#include "nvml.h"

#include <dlfcn.h>
#include <string.h>

typedef void *nvml_handle;
struct nvml_memory {
    unsigned long long total, free, used;
};

struct nvml {
    int (*init)(void);
    int (*shutdown)(void);
    int (*count)(unsigned *count);
    int (*handle)(unsigned index, nvml_handle *device);
    int (*name)(nvml_handle device, char *name, unsigned length);
    int (*capability)(nvml_handle device, int *major, int *minor);
    int (*memory)(nvml_handle device, struct nvml_memory *memory);
    int (*cores)(nvml_handle device, unsigned *cores);
};

/* A data pointer becomes a function pointer as POSIX's dlsym has it. */
static int find(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

static int open_nvml(void *library, struct nvml *n)
{
    return find(library, "nvmlInit_v2", &n->init) & find(library, "nvmlShutdown", &n->shutdown) &
           find(library, "nvmlDeviceGetCount_v2", &n->count) &
           find(library, "nvmlDeviceGetHandleByIndex_v2", &n->handle) &
           find(library, "nvmlDeviceGetName", &n->name) &
           find(library, "nvmlDeviceGetCudaComputeCapability", &n->capability) &
           find(library, "nvmlDeviceGetMemoryInfo", &n->memory) &
           find(library, "nvmlDeviceGetNumGpuCores", &n->cores);
}

static int read_device(const struct nvml *n, unsigned index, struct nvml_device *device)
{
    nvml_handle handle;
    struct nvml_memory memory = {0, 0, 0};
    unsigned cores = 0;
    int major = 0, minor = 0;
    memset(device, 0, sizeof *device);
    if (n->handle(index, &handle) != 0 || n->capability(handle, &major, &minor) != 0) {
        return 0;
    }
    n->name(handle, device->name, sizeof device->name - 1);
    n->memory(handle, &memory);
    n->cores(handle, &cores);
    device->major = major;
    device->minor = minor;
    device->num_sms = (int32_t)(cores / (major == 8 && minor == 0 ? 64 : 128));
    device->memory_bytes = (int64_t)memory.total;
    return 1;
}

int32_t nvml_devices(struct nvml_device *devices, int32_t room, const char **cause)
{
    struct nvml n;
    unsigned count = 0;
    int32_t found = 0;
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        *cause = "libnvidia-ml.so.1 is not there: no NVIDIA driver";
        return 0;
    }
    if (!open_nvml(library, &n)) {
        *cause = "libnvidia-ml.so.1 is too old";
        goto close;
    }
    if (n.init() != 0) {
        *cause = "the NVIDIA driver does not answer (nvmlInit failed)";
        goto close;
    }
    if (n.count(&count) != 0 || count == 0) {
        *cause = "the NVIDIA driver is there and no GPU is";
    }
    for (unsigned i = 0; i < count && found < room; i++) {
        found += read_device(&n, i, &devices[found]);
    }
    if (count > 0 && found == 0) {
        *cause = "no GPU tells its compute capability";
    }
    n.shutdown();
close:
    dlclose(library);
    return found;
}
