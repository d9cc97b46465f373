/* SPDX-License-Identifier: Apache-2.0 */
/* gpu/host and gpu/kernels as a backend of the CPU, so that attn-check holds them to cpu_ref
 * without a GPU. Slow: for tests alone. */
#include <string.h>

#include "common/entry.h"
#include "gpu/host/backend.h"
#include "gpu/host/instance.h"

#define NAME "gpu_host"

/* All but the memory, streams and graphs of a device. */
static struct attn_kernels kernels;

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    const struct attn_device_info info = {.struct_size = sizeof info,
                                          .device = {ATTN_DEVICE_CPU, 0},
                                          .name = "fibres",
                                          .arch = "",
                                          .isa = "",
                                          .num_multiprocessors = 1};
    struct attn_backend_caps mine = gpu_caps;
    (void)host, (void)error;
    mine.name = NAME;
    mine.device = (struct attn_device){ATTN_DEVICE_CPU, 0};
    attn_status status = sink->device(sink->user, &info);
    return status == ATTN_OK ? sink->backend(sink->user, &mine) : status;
}

static attn_status create(const struct attn_create_args *args, attn_instance **instance,
                          const struct attn_kernels **table, struct attn_error *error)
{
    *instance = NULL;
    struct attn_instance *made = args->host->allocate(args->host->user, sizeof *made, 64);
    if (made == NULL) {
        return plugin_error(error, ATTN_ERROR_OUT_OF_MEMORY, "instance", "%zu bytes", sizeof *made);
    }
    memset(made, 0, sizeof *made);
    made->host = args->host;
    gpu_device_open(&made->device, args->device.id);
    kernels = gpu_kernels;
    kernels.allocate_memory = NULL;
    kernels.free_memory = NULL;
    kernels.memory_device = NULL;
    kernels.create_stream = NULL;
    kernels.destroy_stream = NULL;
    kernels.synchronize = NULL;
    kernels.begin_capture = NULL;
    kernels.end_capture = NULL;
    kernels.launch_graph = NULL;
    kernels.destroy_graph = NULL;
    *instance = made;
    *table = &kernels;
    return ATTN_OK;
}

static void destroy(attn_instance *instance)
{
    if (instance != NULL) {
        instance->host->release(instance->host->user, instance, sizeof *instance);
    }
}

static const struct attn_plugin plugin_table = {
    .struct_size = sizeof plugin_table,
    .abi_version = ATTN_ABI_VERSION,
    .name = NAME,
    .version = "0.1.0",
    .vendor = "libattn",
    .probe = probe,
    .supports = gpu_supports,
    .create = create,
    .destroy = destroy,
};

attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,
                              const struct attn_plugin **plugin, struct attn_error *error)
{
    return plugin_answer(&plugin_table, abi_version_min, abi_version_max, plugin, error);
}
