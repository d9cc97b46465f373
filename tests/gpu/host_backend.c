/* SPDX-License-Identifier: Apache-2.0 */
/* gpu/host and gpu/kernels as a backend of the CPU, so that attn-check holds them to cpu_ref
 * without a GPU. Slow: for tests alone. */
#include "common/entry.h"
#include "gpu/host/backend.h"

#define NAME "gpu_host"

/* All but the memory, streams and graphs of a device: set when the plugin is entered. */
static struct attn_kernels kernels;

static void leave_out_services(void)
{
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
}

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    const struct attn_device_info info = {.struct_size = sizeof info,
                                          .device = {ATTN_DEVICE_CPU, 0},
                                          .name = "fibres",
                                          .arch = "",
                                          .isa = "",
                                          .num_multiprocessors = 1};
    (void)host, (void)error;
    return gpu_report(sink, &info, &gpu_caps);
}

const struct gpu_vendor gpu_vendor = {
    .name = NAME,
    .device_type = ATTN_DEVICE_CPU,
    .kernels = &kernels,
};

static const struct attn_plugin plugin_table = {
    .struct_size = sizeof plugin_table,
    .abi_version = ATTN_ABI_VERSION,
    .name = NAME,
    .version = "0.1.0",
    .vendor = "libattn",
    .probe = probe,
    .supports = gpu_supports,
    .create = gpu_create,
    .destroy = gpu_destroy,
};

attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,
                              const struct attn_plugin **plugin, struct attn_error *error)
{
    leave_out_services();
    return plugin_answer(&plugin_table, abi_version_min, abi_version_max, plugin, error);
}
