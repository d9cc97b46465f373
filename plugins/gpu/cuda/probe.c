/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cuda/probe.h"

#include "common/entry.h"
#include "gpu/cuda/nvml.h"
#include "gpu/host/backend.h"

attn_status cuda_probe(const struct attn_probe_sink *sink, const struct attn_backend_caps *caps,
                       const struct attn_backend_caps *hopper, struct attn_error *error)
{
    struct gpu_found devices[GPU_MAX_FOUND];
    const char *cause = "";
    int32_t count = nvml_devices(devices, GPU_MAX_FOUND, &cause), usable = 0;
    attn_status status = ATTN_OK;
    if (count == 0) {
        return plugin_error(error, ATTN_ERROR_ABSENT, "device", "%s", cause);
    }
    for (int32_t i = 0; i < count; i++) {
        attn_status taken = gpu_report(sink, &devices[i], i, devices[i].major == 9 ? hopper : caps);
        status = status ? status : taken;
        usable += devices[i].served;
    }
    if (usable == 0) {
        return plugin_error(error, ATTN_ERROR_ABSENT, "compute_capability",
                            "%d.%d of the first GPU; from 8.0 on is served", devices[0].major,
                            devices[0].minor);
    }
    return status;
}
