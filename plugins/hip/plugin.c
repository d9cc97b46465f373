/* SPDX-License-Identifier: Apache-2.0 */
/* hip: AMD GPUs. The entry, the probe and instances. */
#include <string.h>

#include "common/entry.h"
#include "gpu/host/backend.h"
#include "gpu/host/instance.h"
#include "kfd.h"
#include "runtime.h"

#define NAME "hip"

static attn_status report(const struct attn_probe_sink *sink, const struct kfd_device *device,
                          int32_t id)
{
    const struct attn_device_info info = {
        .struct_size = sizeof info,
        .device = {ATTN_DEVICE_ROCM, id},
        .name = device->name,
        .arch = device->arch,
        .isa = "",
        .compute_capability_major = device->major,
        .compute_capability_minor = device->minor,
        .num_multiprocessors = device->num_cus,
        .memory_bytes = device->memory_bytes,
    };
    struct attn_backend_caps mine = gpu_caps;
    attn_status status = sink->device(sink->user, &info);
    mine.name = NAME;
    mine.device = (struct attn_device){ATTN_DEVICE_ROCM, id};
    return status == ATTN_OK && device->served ? sink->backend(sink->user, &mine) : status;
}

static attn_status hip_probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                             struct attn_error *error)
{
    struct kfd_device devices[KFD_MAX_DEVICES];
    const char *cause = "";
    int32_t count = kfd_devices(devices, KFD_MAX_DEVICES, &cause), usable = 0;
    attn_status status = ATTN_OK;
    (void)host;
    if (count == 0) {
        return plugin_error(error, ATTN_ERROR_ABSENT, "device", "%s", cause);
    }
    if (hip_runtime(&cause) == NULL) {
        return plugin_error(error, ATTN_ERROR_ABSENT, "runtime", "%s", cause);
    }
    for (int32_t i = 0; i < count; i++) {
        attn_status taken = report(sink, &devices[i], i);
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

static attn_status hip_create(const struct attn_create_args *args, attn_instance **instance,
                              const struct attn_kernels **table, struct attn_error *error)
{
    *instance = NULL;
    *table = NULL;
    if (strcmp(args->backend, NAME) != 0 || args->variant[0] != '\0' ||
        args->device.type != ATTN_DEVICE_ROCM) {
        return plugin_error(error, ATTN_ERROR_NOT_FOUND, "backend",
                            "%s@%s on device type %d; hip on type %d is here", args->backend,
                            args->variant, args->device.type, ATTN_DEVICE_ROCM);
    }
    if (args->num_options > 0) {
        return plugin_refuse_option(args, error);
    }
    struct attn_instance *made = args->host->allocate(args->host->user, sizeof *made, 64);
    if (made == NULL) {
        return plugin_error(error, ATTN_ERROR_OUT_OF_MEMORY, "instance", "%zu bytes", sizeof *made);
    }
    memset(made, 0, sizeof *made);
    made->host = args->host;
    const char *cause = gpu_device_open(&made->device, args->device.id);
    if (cause != NULL) {
        args->host->release(args->host->user, made, sizeof *made);
        return plugin_error(error, ATTN_ERROR_DEVICE, "device", "device %d: %s", args->device.id,
                            cause);
    }
    *instance = made;
    *table = &gpu_kernels;
    return ATTN_OK;
}

static void hip_destroy(attn_instance *instance)
{
    if (instance != NULL) {
        gpu_device_close(&instance->device);
        instance->host->release(instance->host->user, instance, sizeof *instance);
    }
}

static const struct attn_plugin plugin_table = {
    .struct_size = sizeof plugin_table,
    .abi_version = ATTN_ABI_VERSION,
    .name = NAME,
    .version = "0.1.0",
    .vendor = "libattn",
    .probe = hip_probe,
    .supports = gpu_supports,
    .create = hip_create,
    .destroy = hip_destroy,
};

attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,
                              const struct attn_plugin **plugin, struct attn_error *error)
{
    return plugin_answer(&plugin_table, abi_version_min, abi_version_max, plugin, error);
}
