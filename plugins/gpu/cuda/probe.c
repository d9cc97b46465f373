/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cuda/probe.h"

#include "common/entry.h"
#include "gpu/cuda/nvml.h"
#include "gpu/host/backend.h"

static attn_status report(const struct attn_probe_sink *sink, const struct nvml_device *device,
                          int32_t id, const struct attn_backend_caps *caps)
{
    char arch[16];
    snprintf(arch, sizeof arch, "sm_%d%d", device->major, device->minor);
    const struct attn_device_info info = {
        .struct_size = sizeof info,
        .device = {ATTN_DEVICE_CUDA, id},
        .name = device->name,
        .arch = arch,
        .isa = "",
        .compute_capability_major = device->major,
        .compute_capability_minor = device->minor,
        .num_multiprocessors = device->num_sms,
        .memory_bytes = device->memory_bytes,
        .uuid = device->uuid,
    };
    return gpu_report(sink, &info, device->major >= 8 ? caps : NULL);
}

attn_status cuda_probe(const struct attn_probe_sink *sink, const struct attn_backend_caps *caps,
                       const struct attn_backend_caps *hopper, struct attn_error *error)
{
    struct nvml_device devices[NVML_MAX_DEVICES];
    const char *cause = "";
    int32_t count = nvml_devices(devices, NVML_MAX_DEVICES, &cause), usable = 0;
    attn_status status = ATTN_OK;
    if (count == 0) {
        return plugin_error(error, ATTN_ERROR_ABSENT, "device", "%s", cause);
    }
    for (int32_t i = 0; i < count; i++) {
        attn_status taken = report(sink, &devices[i], i, devices[i].major == 9 ? hopper : caps);
        status = status ? status : taken;
        usable += devices[i].major >= 8;
    }
    if (usable == 0) {
        return plugin_error(error, ATTN_ERROR_ABSENT, "compute_capability",
                            "%d.%d of the first GPU; from 8.0 on is served", devices[0].major,
                            devices[0].minor);
    }
    return status;
}
