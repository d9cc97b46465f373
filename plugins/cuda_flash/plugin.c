/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_flash: NVIDIA GPUs of compute capability 8.0 and later. The plugin's entry, probe and
 * instances. */
#include <attn/draft/compressed.h>

#include "common/entry.h"
#include "cuda_flash/decode/sm80_attend.h"
#include "cuda_flash/mla/sm90_latent.h"
#include "gpu/cuda/probe.h"
#include "gpu/host/backend.h"
#include "gpu/host/schedule.h"
#include "gpu/index.h"
#include "gpu/latent.h"
#include "gpu/lists.h"

#define NAME "cuda_flash"

extern const struct gpu_matrix_kernels sm80_matrix;     /* sm80_attend.c */
extern const struct gpu_delta_chunks sm80_delta_chunks; /* sm80_gated_delta.c */
extern const struct gpu_gemm sm80_gemm;                 /* sm80_gemm.cu */
extern const struct gpu_prefill sm80_prefill;           /* sm80_prefill.c */
#ifdef CUDA_FLASH_SM90
extern const struct gpu_prefill sm90_prefill;           /* sm90_prefill.c */
extern const struct gpu_latent_kernel sm90_latent;      /* sm90_latent.c */
extern const struct gpu_index_scores sm90_index_scores; /* sm90_index.cu */
extern const struct gpu_list_kernel sm90_lists;         /* sm90_lists.cu */
#endif

/* Output forms that the kernels write, and those that a separate kernel quantizes. */
#define OUTPUT_FORMS ((1u << (ATTN_OUTPUT_NVFP4 + 1)) - 1)

static attn_status cuda_flash_probe(const struct attn_host *host,
                                    const struct attn_probe_sink *sink, struct attn_error *error)
{
    struct attn_backend_caps caps = gpu_caps, hopper;
    (void)host;
    caps.output_forms = OUTPUT_FORMS;
    hopper = caps;
#ifdef CUDA_FLASH_SM90
    const struct attn_compressed_caps both = {
        .ext = {ATTN_EXT_DRAFT_COMPRESSED_CAPS, 0, sizeof both, caps.next},
        .kv_dtypes = BIT(ATTN_KV_BF16) | BIT(ATTN_KV_FP8_DS_V4),
        .dtypes = BIT(ATTN_DTYPE_BF16),
        .head_size = LATENT_MAX_RANK,
        .num_q_heads = SM90_LATENT_ROWS,
        .kv_alignment = 16};
    hopper.next = &both.ext;
#endif
    return cuda_probe(sink, &caps, &hopper, error);
}

static const char *add_kernels(struct attn_instance *instance)
{
    instance->matrix = &sm80_matrix;
    instance->chunks = &sm80_delta_chunks;
    instance->gemm = &sm80_gemm;
#ifndef CUDA_FLASH_SM90_ALONE
    instance->prefill = &sm80_prefill;
#endif
#ifdef CUDA_FLASH_SM90
    if (instance->device.major == 9) {
        instance->prefill = &sm90_prefill;
        instance->latent = &sm90_latent;
        instance->index_scores = &sm90_index_scores;
        instance->lists = &sm90_lists;
    }
#endif
    return sm80_gemm.load(&instance->device); /* a service, which no layer asks for */
}

static const char *load_kernels(const struct attn_instance *instance,
                                const struct attn_layer_desc *layer,
                                const struct attn_prepared *prepared)
{
    const struct gpu_device *device = &instance->device;
    const char *cause = NULL;
    switch (prepared->way) {
    case GPU_WAY_CHUNKS:
        return instance->chunks->load(device);
    case GPU_WAY_LATENT:
        return instance->latent != NULL ? instance->latent->load(device) : NULL;
    case GPU_WAY_BOTH_CACHES:
        return instance->latent->load_both(device);
    case GPU_WAY_INDEX:
        return instance->index_scores != NULL ? instance->index_scores->load(device) : NULL;
    case GPU_WAY_ATTEND:
        cause = sm80_load(device, layer);
        cause = cause == NULL && instance->lists != NULL && prepared->listed > 0
                    ? instance->lists->load(device)
                    : cause;
        return cause == NULL && instance->prefill != NULL
                   ? instance->prefill->load(device, layer, prepared)
                   : cause;
    default:
        return NULL; /* the portable kernels, which a device loads when it is opened */
    }
}

const struct gpu_vendor gpu_vendor = {
    .name = NAME,
    .device_type = ATTN_DEVICE_CUDA,
    .kernels = &gpu_kernels,
    .add_kernels = add_kernels,
    .load_kernels = load_kernels,
};

PLUGIN_ENTRY(NAME, cuda_flash_probe, gpu_supports, gpu_create, gpu_destroy)
