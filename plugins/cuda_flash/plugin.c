/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_flash: NVIDIA GPUs from compute capability 8.0 on. The entry, the probe and instances. */
#include <string.h>

#include "common/entry.h"
#include "gpu/host/backend.h"
#include "gpu/host/schedule.h"
#include "nvml.h"

#define NAME "cuda_flash"

#ifdef CUDA_FLASH_SM90
extern const struct gpu_prefill sm90_prefill; /* sm90_prefill.c */
#endif

static attn_status report(const struct attn_probe_sink *sink, const struct nvml_device *device,
                          int32_t id)
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
    };
    struct attn_backend_caps mine = gpu_caps;
    attn_status status = sink->device(sink->user, &info);
    mine.name = NAME;
    mine.device = (struct attn_device){ATTN_DEVICE_CUDA, id};
    return status == ATTN_OK && device->major >= 8 ? sink->backend(sink->user, &mine) : status;
}

static attn_status cuda_probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                              struct attn_error *error)
{
    struct nvml_device devices[NVML_MAX_DEVICES];
    const char *cause = "";
    int32_t count = nvml_devices(devices, NVML_MAX_DEVICES, &cause), usable = 0;
    attn_status status = ATTN_OK;
    (void)host;
    if (count == 0) {
        return plugin_error(error, ATTN_ERROR_ABSENT, "device", "%s", cause);
    }
    for (int32_t i = 0; i < count; i++) {
        attn_status taken = report(sink, &devices[i], i);
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

static attn_status cuda_create(const struct attn_create_args *args, attn_instance **instance,
                               const struct attn_kernels **table, struct attn_error *error)
{
    *instance = NULL;
    *table = NULL;
    if (strcmp(args->backend, NAME) != 0 || args->variant[0] != '\0' ||
        args->device.type != ATTN_DEVICE_CUDA) {
        return plugin_error(error, ATTN_ERROR_NOT_FOUND, "backend",
                            "%s@%s on device type %d; cuda_flash on type %d is here", args->backend,
                            args->variant, args->device.type, ATTN_DEVICE_CUDA);
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
#ifdef CUDA_FLASH_SM90
    if (cause == NULL && made->device.major == 9) {
        made->prefill = &sm90_prefill;
        cause = sm90_prefill.load(&made->device);
    }
#endif
    if (cause != NULL) {
        args->host->release(args->host->user, made, sizeof *made);
        return plugin_error(error, ATTN_ERROR_DEVICE, "device", "device %d: %s", args->device.id,
                            cause);
    }
    *instance = made;
    *table = &gpu_kernels;
    return ATTN_OK;
}

static void cuda_destroy(attn_instance *instance)
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
    .probe = cuda_probe,
    .supports = gpu_supports,
    .create = cuda_create,
    .destroy = cuda_destroy,
};

attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,
                              const struct attn_plugin **plugin, struct attn_error *error)
{
    return plugin_answer(&plugin_table, abi_version_min, abi_version_max, plugin, error);
}
