/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_flash: NVIDIA GPUs from compute capability 8.0 on. The entry, the probe and instances. */
#include <string.h>

#include "common/entry.h"
#include "gpu/host/instance.h"
#include "nvml.h"

#define BIT(code) (UINT64_C(1) << (code))

static const struct attn_head_size_range head_sizes[] = {{{8, 512, 8}, {8, 512, 8}, 0}};
static const struct attn_range block_sizes[] = {{1, 4096, 1}};

static const struct attn_backend_caps caps = {
    .struct_size = sizeof caps,
    .name = "cuda_flash",
    .variant = "",
    .version = "0.1.0",
    .vendor = "libattn",
    .device = {ATTN_DEVICE_CUDA, 0},
    .kernels = ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV | ATTN_KERNEL_MERGE_STATES |
               ATTN_KERNEL_ROPE_WRITE_KV | ATTN_KERNEL_GATHER_KV | ATTN_KERNEL_QUANTIZE |
               ATTN_KERNEL_AMAX | ATTN_KERNEL_COPY_BLOCKS | ATTN_KERNEL_COPY | ATTN_KERNEL_FILL,
    .layer_kinds = BIT(ATTN_LAYER_DECODER) | BIT(ATTN_LAYER_ENCODER) |
                   BIT(ATTN_LAYER_ENCODER_ONLY) | BIT(ATTN_LAYER_CROSS) |
                   BIT(ATTN_LAYER_MM_ENCODER),
    .phases = BIT(ATTN_PHASE_PREFILL) | BIT(ATTN_PHASE_DECODE),
    .dtypes = BIT(ATTN_DTYPE_F16) | BIT(ATTN_DTYPE_BF16) | BIT(ATTN_DTYPE_F32),
    .kv_dtypes = BIT(ATTN_KV_AUTO) | BIT(ATTN_KV_F16) | BIT(ATTN_KV_BF16) | BIT(ATTN_KV_F32) |
                 BIT(ATTN_KV_FP8_E4M3) | BIT(ATTN_KV_FP8_E5M2) | BIT(ATTN_KV_FP8_PER_TOKEN_HEAD) |
                 BIT(ATTN_KV_INT8_PER_TOKEN_HEAD) | BIT(ATTN_KV_INT4_PER_TOKEN_HEAD) |
                 BIT(ATTN_KV_INT8_KV) | BIT(ATTN_KV_INT8_K) | BIT(ATTN_KV_NVFP4),
    .q_dtypes = BIT(ATTN_DTYPE_FP8_E4M3) | BIT(ATTN_DTYPE_FP8_E5M2) | BIT(ATTN_DTYPE_INT8),
    .terms = ATTN_TERM_CAUSAL | ATTN_TERM_BIDIRECTIONAL | ATTN_TERM_CAUSAL_PER_REQUEST |
             ATTN_TERM_SLIDING_WINDOW | ATTN_TERM_SYMMETRIC_WINDOW | ATTN_TERM_CHUNKED_LOCAL |
             ATTN_TERM_SOFT_CAP | ATTN_TERM_ALIBI | ATTN_TERM_ALIBI_SQRT | ATTN_TERM_SINKS |
             ATTN_TERM_PREFIX_LM | ATTN_TERM_TREE_BITS | ATTN_TERM_TREE_BIAS,
    .features =
        ATTN_FEATURE_PAGED_KV | ATTN_FEATURE_CONTIGUOUS_KV | ATTN_FEATURE_LSE |
        ATTN_FEATURE_BLOCK_TABLE_ROW | ATTN_FEATURE_MIXED_BATCH | ATTN_FEATURE_UPDATE_BLOCK_TABLE |
        ATTN_FEATURE_DEVICE_SEQ_LENS | ATTN_FEATURE_FUSED_ROPE | ATTN_FEATURE_FUSED_ROPE_NORM |
        ATTN_FEATURE_BATCH_INVARIANT | ATTN_FEATURE_QUANTIZED_QUERY | ATTN_FEATURE_FAST_PREFILL,
    .walks = ATTN_WALK_NHD | ATTN_WALK_HND | ATTN_WALK_PACKED | ATTN_WALK_SEPARATE_STRIDES,
    .layouts = BIT(ATTN_KV_LAYOUT_NHD) | BIT(ATTN_KV_LAYOUT_HND) | BIT(ATTN_KV_LAYOUT_NHD_INNER) |
               BIT(ATTN_KV_LAYOUT_HND_INNER) | BIT(ATTN_KV_LAYOUT_HND_ROWS) |
               BIT(ATTN_KV_LAYOUT_PACKED_K),
    .k_scale_forms = BIT(ATTN_SCALE_NONE) | BIT(ATTN_SCALE_PER_TENSOR) | BIT(ATTN_SCALE_PER_HEAD),
    .v_scale_forms = BIT(ATTN_SCALE_NONE) | BIT(ATTN_SCALE_PER_TENSOR) | BIT(ATTN_SCALE_PER_HEAD),
    .p_scale_forms = BIT(ATTN_SCALE_NONE) | BIT(ATTN_SCALE_PER_TENSOR),
    .output_forms = BIT(ATTN_OUTPUT_PLAIN),
    .head_sizes = head_sizes,
    .block_sizes = block_sizes,
    .num_head_sizes = 1,
    .num_block_sizes = 1,
    .preferred_layout = ATTN_KV_LAYOUT_HND,
    .preferred_block_size = 64,
    .graph_level = ATTN_GRAPH_ALWAYS, /* plan writes the schedule on the device */
    .graph_fill_seq_len = 1,
    .reorder_threshold = 1,
    .max_speculative_tokens = 0,
    .rank = {50, 50},
};

static const struct attn_kernels kernels = {
    .struct_size = sizeof kernels,
    .attend = gpu_attend,
    .write_kv = gpu_write_kv,
    .merge_states = gpu_merge_states,
    .rope_write_kv = gpu_rope_write_kv,
    .gather_kv = gpu_gather_kv,
    .quantize = gpu_quantize,
    .amax = gpu_amax,
    .copy_blocks = gpu_copy_blocks,
    .copy = gpu_copy,
    .fill = gpu_fill,
    .prepare = gpu_prepare,
    .release = gpu_release,
    .plan_size = gpu_plan_size,
    .plan = gpu_plan,
    .update_block_table = gpu_update_block_table,
    .allocate_memory = gpu_allocate_memory,
    .free_memory = gpu_free_memory,
    .memory_device = gpu_memory_device,
    .create_stream = gpu_create_stream,
    .destroy_stream = gpu_destroy_stream,
    .synchronize = gpu_synchronize,
    .begin_capture = gpu_begin_capture,
    .end_capture = gpu_end_capture,
    .launch_graph = gpu_launch_graph,
    .destroy_graph = gpu_destroy_graph,
};

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
    struct attn_backend_caps mine = caps;
    attn_status status = sink->device(sink->user, &info);
    mine.device.id = id;
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

/* What the masks cannot say. */
static attn_status cuda_supports(const struct attn_backend_caps *backend,
                                 const struct attn_layer_desc *layer, int32_t phase,
                                 const struct attn_reason_sink *reasons, struct attn_error *error)
{
    char asked[64];
    int32_t v = layer->head_size_v > 0 ? layer->head_size_v : layer->head_size;
    (void)backend, (void)phase, (void)error;
    snprintf(asked, sizeof asked, "%d, %d", layer->head_size, v);
    if (layer->kv_dtype == ATTN_KV_INT4_PER_TOKEN_HEAD &&
        ((layer->head_size & (layer->head_size - 1)) != 0 || (v & (v - 1)) != 0)) {
        reasons->refuse(reasons->user, "head_size", asked,
                        "powers of two with kv_dtype int4_per_token_head");
    }
    if (layer->kv_dtype == ATTN_KV_NVFP4 && (layer->head_size % 16 != 0 || v % 64 != 0)) {
        reasons->refuse(reasons->user, "head_size", asked,
                        "multiples of 16, of 64 for v, with kv_dtype nvfp4");
    }
    if (layer->kv_dtype == ATTN_KV_NVFP4 && layer->block_size % 4 != 0) {
        snprintf(asked, sizeof asked, "%d", layer->block_size);
        reasons->refuse(reasons->user, "block_size", asked, "multiples of 4 with kv_dtype nvfp4");
    }
    if (layer->p_scale_form != ATTN_SCALE_NONE && layer->sink_len > 0) {
        reasons->refuse(reasons->user, "p_scale_form", "with a static sink",
                        "where a row is attended as a whole");
    }
    if (layer->kv_dtype == ATTN_KV_INT8_K && layer->dtype == ATTN_DTYPE_F32) {
        reasons->refuse(reasons->user, "dtype", "f32", "f16, bf16 with kv_dtype int8_k");
    }
    return ATTN_OK;
}

static attn_status cuda_create(const struct attn_host *host, const char *backend,
                               const char *variant, struct attn_device device,
                               attn_instance **instance, const struct attn_kernels **table,
                               struct attn_error *error)
{
    *instance = NULL;
    *table = NULL;
    if (strcmp(backend, caps.name) != 0 || variant[0] != '\0' || device.type != ATTN_DEVICE_CUDA) {
        return plugin_error(error, ATTN_ERROR_NOT_FOUND, "backend",
                            "%s@%s on device type %d; cuda_flash on type %d is here", backend,
                            variant, device.type, ATTN_DEVICE_CUDA);
    }
    struct attn_instance *made = host->allocate(host->user, sizeof *made, 64);
    if (made == NULL) {
        return plugin_error(error, ATTN_ERROR_OUT_OF_MEMORY, "instance", "%zu bytes", sizeof *made);
    }
    memset(made, 0, sizeof *made);
    made->host = host;
    const char *cause = gpu_device_open(&made->device, device.id);
    if (cause != NULL) {
        host->release(host->user, made, sizeof *made);
        return plugin_error(error, ATTN_ERROR_DEVICE, "device", "device %d: %s", device.id, cause);
    }
    *instance = made;
    *table = &kernels;
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
    .name = "cuda_flash",
    .version = "0.1.0",
    .vendor = "libattn",
    .probe = cuda_probe,
    .supports = cuda_supports,
    .create = cuda_create,
    .destroy = cuda_destroy,
};

attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,
                              const struct attn_plugin **plugin, struct attn_error *error)
{
    return plugin_answer(&plugin_table, abi_version_min, abi_version_max, plugin, error);
}
