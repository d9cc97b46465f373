/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_flash: NVIDIA GPUs of compute capability 8.0 and later. The plugin's entry, probe and
 * instances. */
#include "common/entry.h"
#include "gpu/host/backend.h"
#include "gpu/host/schedule.h"
#include "gpu/latent.h"
#include "nvml.h"

#define NAME "cuda_flash"

extern const struct gpu_matrix_kernels sm80_matrix;     /* sm80_attend.c */
extern const struct gpu_delta_chunks sm80_delta_chunks; /* sm80_gated_delta.c */
extern const struct gpu_gemm sm80_gemm;                 /* sm80_gemm.cu */
#ifdef CUDA_FLASH_SM90
extern const struct gpu_prefill sm90_prefill;      /* sm90_prefill.c */
extern const struct gpu_latent_kernel sm90_latent; /* sm90_latent.c */
#endif

/* Output forms that the kernels write, and those that a separate kernel quantizes. */
#define OUTPUT_FORMS ((1u << (ATTN_OUTPUT_NVFP4 + 1)) - 1)

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
        .uuid = device->uuid,
    };
    struct attn_backend_caps caps = gpu_caps;
    caps.output_forms = OUTPUT_FORMS;
    return gpu_report(sink, &info, device->major >= 8 ? &caps : NULL);
}

static attn_status cuda_probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                              struct attn_error *error)
{
    struct nvml_device devices[NVML_MAX_DEVICES];
    const char *cause = "";
    int32_t count = nvml_devices(devices, NVML_MAX_DEVICES, &cause), usable = 0;
    attn_status status = ATTN_OK;
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

static const char *add_kernels(struct attn_instance *instance)
{
    instance->matrix = &sm80_matrix;
    instance->chunks = &sm80_delta_chunks;
    instance->gemm = &sm80_gemm;
    const char *cause = sm80_delta_chunks.load(&instance->device);
    cause = cause != NULL ? cause : sm80_gemm.load(&instance->device);
#ifdef CUDA_FLASH_SM90
    if (instance->device.major == 9) {
        cause = cause != NULL ? cause : sm90_prefill.load(&instance->device);
        instance->prefill = &sm90_prefill;
        instance->latent = &sm90_latent;
        return cause != NULL ? cause : sm90_latent.load(&instance->device);
    }
#endif
    return cause;
}

const struct gpu_vendor gpu_vendor = {
    .name = NAME,
    .device_type = ATTN_DEVICE_CUDA,
    .kernels = &gpu_kernels,
    .add_kernels = add_kernels,
};

PLUGIN_ENTRY(NAME, cuda_probe, gpu_supports, gpu_create, gpu_destroy)
