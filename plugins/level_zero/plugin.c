/* SPDX-License-Identifier: Apache-2.0 */
/* level_zero: Intel GPUs. The entry and the probe. */
#include <pthread.h>

#include "common/entry.h"
#include "gpu/host/backend.h"
#include "gpu/host/instance.h"
#include "loaded.h"
#include "sysfs.h"

#define NAME "level_zero"
/* Caches whose codes and scales the kernels find in double. */
#define IN_DOUBLE                                                                                  \
    (BIT(ATTN_KV_INT4_PER_TOKEN_HEAD) | BIT(ATTN_KV_NVFP4) | BIT(ATTN_KV_TURBOQUANT_K8V4) |        \
     BIT(ATTN_KV_TURBOQUANT_4BIT_NC) | BIT(ATTN_KV_TURBOQUANT_K3V4_NC) |                           \
     BIT(ATTN_KV_TURBOQUANT_3BIT_NC))

static attn_status level_zero_probe(const struct attn_host *host,
                                    const struct attn_probe_sink *sink, struct attn_error *error)
{
    struct intel_device devices[GPU_MAX_FOUND];
    const char *cause = "";
    int32_t count = intel_devices(devices, GPU_MAX_FOUND, &cause), usable = 0;
    attn_status status = ATTN_OK;
    struct attn_backend_caps without = gpu_caps;
    without.kernels &= ~ATTN_KERNEL_QUANTIZE;
    without.kv_dtypes &= ~IN_DOUBLE;
    if (count == 0) {
        return plugin_error(error, ATTN_ERROR_ABSENT, "device", "%s", cause);
    }
    if (ze_loader(&cause) == NULL) {
        return plugin_error(error, ATTN_ERROR_ABSENT, "runtime", "%s", cause);
    }
    for (int32_t i = 0; i < count; i++) {
        attn_status taken =
            gpu_report(sink, &devices[i].found, i, devices[i].has_double ? &gpu_caps : &without);
        status = status ? status : taken;
        usable += devices[i].found.served;
    }
    if (usable == 0) {
        return plugin_error(error, ATTN_ERROR_ABSENT, "arch",
                            "%s is of no family that is served: pvc, dg2, mtl, lnl, bmg",
                            devices[0].found.name);
    }
    return status;
}

static struct attn_kernels without_double;

static void fill_without_double(void)
{
    without_double = gpu_kernels;
    without_double.quantize = NULL;
}

static const char *add_kernels(struct attn_instance *instance)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (loaded_of(&instance->device)->has_matrix) {
        instance->matrix = &level_zero_matrix;
    }
    if (!loaded_of(&instance->device)->has_double) {
        pthread_once(&once, fill_without_double);
        instance->kernels = &without_double;
    }
    return NULL;
}

const struct gpu_vendor gpu_vendor = {
    .name = NAME,
    .device_type = ATTN_DEVICE_ONEAPI,
    .kernels = &gpu_kernels,
    .add_kernels = add_kernels,
};

PLUGIN_ENTRY(NAME, level_zero_probe, gpu_supports, gpu_create, gpu_destroy)
