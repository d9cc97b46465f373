/* SPDX-License-Identifier: Apache-2.0 */
/* hip: AMD GPUs. The entry and the probe. */
#include "common/entry.h"
#include "device.h"
#include "gpu/host/backend.h"
#include "gpu/host/instance.h"
#include "kfd.h"
#include "runtime.h"

#define NAME "hip"

static attn_status hip_probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                             struct attn_error *error)
{
    struct gpu_found devices[GPU_MAX_FOUND];
    const char *cause = "";
    int32_t count = kfd_devices(devices, GPU_MAX_FOUND, &cause), usable = 0;
    attn_status status = ATTN_OK;
    if (count == 0) {
        return plugin_error(error, ATTN_ERROR_ABSENT, "device", "%s", cause);
    }
    if (hip_runtime(&cause) == NULL) {
        return plugin_error(error, ATTN_ERROR_ABSENT, "runtime", "%s", cause);
    }
    for (int32_t i = 0; i < count; i++) {
        attn_status taken = gpu_report(sink, &devices[i], i, &gpu_caps);
        status = status ? status : taken;
        usable += devices[i].served;
    }
    if (usable == 0) {
        return plugin_error(error, ATTN_ERROR_ABSENT, "arch",
                            "%s of the first GPU; kernels are for %s", devices[0].arch,
                            HIP_TARGETS);
    }
    return status;
}

extern const struct gpu_matrix_kernels hip_matrix; /* matrix_attend.c */

static const char *add_kernels(struct attn_instance *instance)
{
    instance->matrix = hip_has_attends(&instance->device) ? &hip_matrix : NULL;
    return NULL;
}

const struct gpu_vendor gpu_vendor = {
    .name = NAME,
    .device_type = ATTN_DEVICE_ROCM,
    .kernels = &gpu_kernels,
    .add_kernels = add_kernels,
};

PLUGIN_ENTRY(NAME, hip_probe, gpu_supports, gpu_create, gpu_destroy)
