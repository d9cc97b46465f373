/* SPDX-License-Identifier: Apache-2.0 */
/* gpu/host and gpu/kernels as a backend of the CPU, so that attn-check holds them to cpu_ref
 * without a GPU. Slow: for tests alone. */
#include "common/entry.h"
#include "gpu/host/backend.h"
#include "gpu/host/instance.h"

#define NAME "gpu_host"

#if defined(HOST_MATRIX) /* a plugin's matrix kernels that are there as fibres, too */
extern const struct gpu_matrix_kernels HOST_MATRIX;
#define HOST_MATRIX_KERNELS (&HOST_MATRIX)
#define HOST_OUTPUT_FORMS ((1u << (ATTN_OUTPUT_NVFP4 + 1)) - 1) /* by way of numbers */
#else
#define HOST_MATRIX_KERNELS NULL
#define HOST_OUTPUT_FORMS (1u << ATTN_OUTPUT_PLAIN)
#endif

/* An instance has all but the memory, streams and graphs of a device. */
static const char *leave_out_services(struct attn_instance *instance)
{
    static struct attn_kernels kernels;
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
    kernels.create_event = NULL;
    kernels.record_event = NULL;
    kernels.elapsed = NULL;
    kernels.destroy_event = NULL;
    instance->kernels = &kernels;
    instance->matrix = HOST_MATRIX_KERNELS;
    return NULL;
}

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    const struct gpu_found found = {.name = "fibres", .num_sms = 1, .served = true};
    struct attn_backend_caps caps = gpu_caps;
    caps.output_forms = HOST_OUTPUT_FORMS;
    return gpu_report(sink, &found, 0, &caps);
}

const struct gpu_vendor gpu_vendor = {
    .name = NAME,
    .device_type = ATTN_DEVICE_CPU,
    .kernels = &gpu_kernels,
    .add_kernels = leave_out_services,
};

PLUGIN_ENTRY(NAME, probe, gpu_supports, gpu_create, gpu_destroy)
