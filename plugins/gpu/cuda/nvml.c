/* SPDX-License-Identifier: Apache-2.0 */
/* Sources: NVML API Reference, "Initialization and Cleanup" and "Device Queries"; CUDA C++
 * Programming Guide, "CUDA Environment Variables". */
#include "nvml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/library.h"

typedef void *nvml_handle;
struct nvml_memory {
    unsigned long long total, free, used;
};

struct nvml {
    int (*init)(void);
    int (*shutdown)(void);
    int (*count)(unsigned *count);
    int (*handle)(unsigned index, nvml_handle *device);
    int (*handle_by_uuid)(const char *uuid, nvml_handle *device);
    int (*uuid)(nvml_handle device, char *uuid, unsigned length);
    int (*name)(nvml_handle device, char *name, unsigned length);
    int (*capability)(nvml_handle device, int *major, int *minor);
    int (*memory)(nvml_handle device, struct nvml_memory *memory);
    int (*cores)(nvml_handle device, unsigned *cores);
};

static int open_nvml(void *library, struct nvml *n)
{
    return library_find(library, "nvmlInit_v2", &n->init) &
           library_find(library, "nvmlShutdown", &n->shutdown) &
           library_find(library, "nvmlDeviceGetCount_v2", &n->count) &
           library_find(library, "nvmlDeviceGetHandleByIndex_v2", &n->handle) &
           library_find(library, "nvmlDeviceGetHandleByUUID", &n->handle_by_uuid) &
           library_find(library, "nvmlDeviceGetUUID", &n->uuid) &
           library_find(library, "nvmlDeviceGetName", &n->name) &
           library_find(library, "nvmlDeviceGetCudaComputeCapability", &n->capability) &
           library_find(library, "nvmlDeviceGetMemoryInfo", &n->memory) &
           library_find(library, "nvmlDeviceGetNumGpuCores", &n->cores);
}

static int read_device(const struct nvml *n, nvml_handle handle, struct gpu_found *device)
{
    struct nvml_memory memory = {0, 0, 0};
    unsigned cores = 0;
    int major = 0, minor = 0;
    memset(device, 0, sizeof *device);
    if (n->capability(handle, &major, &minor) != 0) {
        return 0;
    }
    n->name(handle, device->name, sizeof device->name - 1);
    n->uuid(handle, device->uuid, sizeof device->uuid - 1);
    n->memory(handle, &memory);
    n->cores(handle, &cores);
    device->major = major;
    device->minor = minor;
    device->num_sms = (int32_t)(cores / (major == 8 && minor == 0 ? 64 : 128));
    device->memory_bytes = (int64_t)memory.total;
    device->served = major >= 8;
    snprintf(device->arch, sizeof device->arch, "sm_%d%d", major, minor);
    return 1;
}

static int64_t speed_of(const struct gpu_found *d)
{
    return ((int64_t)d->major * 16 + d->minor) * 4096 + d->num_sms;
}

/* NVML orders by PCI bus. CUDA's default order has the fastest GPU first, without a documented
 * measure; this assumes newer, then larger is faster. Equal GPUs keep their order. */
static void order_devices(struct gpu_found *devices, int32_t count)
{
    const char *order = getenv("CUDA_DEVICE_ORDER");
    if (order != NULL && strcmp(order, "PCI_BUS_ID") == 0) {
        return;
    }
    for (int32_t i = 1; i < count; i++) {
        struct gpu_found moved = devices[i];
        int32_t at = i;
        for (; at > 0 && speed_of(&devices[at - 1]) < speed_of(&moved); at--) {
            devices[at] = devices[at - 1];
        }
        devices[at] = moved;
    }
}

/* Finds the device that one entry of CUDA_VISIBLE_DEVICES names: an index, a prefix of one GPU's
 * UUID, or the whole UUID of a MIG slice. */
static int find_entry(const struct nvml *n, const char *entry, const struct gpu_found *all,
                      int32_t count, struct gpu_found *found)
{
    int32_t matches = 0;
    char *end;
    nvml_handle handle;
    if (strncmp(entry, "MIG-", 4) == 0) {
        return n->handle_by_uuid(entry, &handle) == 0 && read_device(n, handle, found);
    }
    if (strncmp(entry, "GPU-", 4) == 0) {
        for (int32_t i = 0; i < count; i++) {
            if (strncmp(all[i].uuid, entry, strlen(entry)) == 0) {
                *found = all[i];
                matches++;
            }
        }
        return matches == 1;
    }
    long index = strtol(entry, &end, 10);
    if (end == entry || *end != '\0' || index < 0 || index >= count) {
        return 0;
    }
    *found = all[index];
    return 1;
}

/* Reads entries up to the first that names no device; a device that is named twice hides all. */
static int32_t visible_devices(const struct nvml *n, const char *text, const struct gpu_found *all,
                               int32_t count, struct gpu_found *devices, int32_t room)
{
    int32_t found = 0;
    while (found < room) {
        char entry[96];
        text += strspn(text, " ");
        size_t length = strcspn(text, ",");
        const char *next = text + length;
        while (length > 0 && text[length - 1] == ' ') {
            length--;
        }
        if (length == 0 || length >= sizeof entry) {
            break;
        }
        memcpy(entry, text, length);
        entry[length] = '\0';
        if (!find_entry(n, entry, all, count, &devices[found])) {
            break;
        }
        for (int32_t i = 0; i < found; i++) {
            if (strcmp(devices[i].uuid, devices[found].uuid) == 0) {
                return 0;
            }
        }
        found++;
        if (*next == '\0') {
            break;
        }
        text = next + 1;
    }
    return found;
}

static int32_t list_devices(const struct nvml *n, struct gpu_found *devices, int32_t room,
                            const char **cause)
{
    struct gpu_found all[GPU_MAX_FOUND];
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    unsigned count = 0;
    int32_t found = 0;
    if (n->count(&count) != 0 || count == 0) {
        *cause = "the NVIDIA driver is there and no GPU is";
        return 0;
    }
    for (unsigned i = 0; i < count && found < GPU_MAX_FOUND; i++) {
        nvml_handle handle;
        found += n->handle(i, &handle) == 0 && read_device(n, handle, &all[found]);
    }
    if (found == 0) {
        *cause = "no GPU tells its compute capability";
        return 0;
    }
    order_devices(all, found);
    if (visible == NULL) {
        found = found < room ? found : room;
        memcpy(devices, all, (size_t)found * sizeof *devices);
        return found;
    }
    found = visible_devices(n, visible, all, found, devices, room);
    if (found == 0) {
        *cause = "CUDA_VISIBLE_DEVICES hides every GPU";
    }
    return found;
}

int32_t nvml_devices(struct gpu_found *devices, int32_t room, const char **cause)
{
    struct nvml n;
    int32_t found = 0;
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        *cause = "libnvidia-ml.so.1 is not there: no NVIDIA driver";
        return 0;
    }
    if (!open_nvml(library, &n)) {
        *cause = "libnvidia-ml.so.1 is too old";
    } else if (n.init() != 0) {
        *cause = "the NVIDIA driver does not answer (nvmlInit failed)";
    } else {
        found = list_devices(&n, devices, room, cause);
        n.shutdown();
    }
    dlclose(library);
    return found;
}
