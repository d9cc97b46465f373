/* SPDX-License-Identifier: Apache-2.0 */
/* What backends on gpu/kernels declare alike, their table, and their instances. */
#include "gpu/host/backend.h"

#include <attn/mla.h>
#include <string.h>

#include "common/entry.h"
#include "common/gated_delta.h"
#include "common/turboquant.h"
#include "gpu/delta.h"
#include "gpu/host/instance.h"
#include "gpu/latent.h"

static const struct attn_head_size_range head_sizes[] = {{{8, 512, 8}, {8, 512, 8}, 0}};
static const struct attn_range block_sizes[] = {{1, 4096, 1}};

static const struct attn_recurrent_caps gdn_caps = {
    .ext = {ATTN_EXT_CAPS_RECURRENT, 0, sizeof gdn_caps, NULL},
    .head_size_k_max = DELTA_MAX_HEAD_SIZE,
    .head_size_v_max = DELTA_MAX_HEAD_SIZE,
    .conv_width_max = DELTA_MAX_CONV_WIDTH,
    .max_speculative_tokens = GDN_MAX_DRAFTED - 1,
};

static const struct attn_mla_caps mla_caps = {
    .ext = {ATTN_EXT_CAPS_MLA, 0, sizeof mla_caps, (struct attn_ext *)&gdn_caps.ext},
    .kv_lora_rank_max = LATENT_MAX_RANK,
    .qk_rope_head_dim_max = LATENT_MAX_SIZE - LATENT_MAX_RANK,
    .num_q_heads_multiple = 1,
    .topk_max = 1 << 20,
    .topk_multiple = 1,
};

const struct attn_backend_caps gpu_caps = {
    .struct_size = sizeof gpu_caps,
    .next = &mla_caps.ext,
    .name = "",
    .variant = "",
    .version = PLUGIN_VERSION,
    .vendor = "libattn",
    .kernels = ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV | ATTN_KERNEL_MERGE_STATES |
               ATTN_KERNEL_ROPE_WRITE_KV | ATTN_KERNEL_GATHER_KV | ATTN_KERNEL_QUANTIZE |
               ATTN_KERNEL_AMAX | ATTN_KERNEL_ATTEND_MLA | ATTN_KERNEL_ATTEND_MLA_SPARSE |
               ATTN_KERNEL_GATED_DELTA | ATTN_KERNEL_BATCHED_GEMM | ATTN_KERNEL_COPY_BLOCKS |
               ATTN_KERNEL_COPY | ATTN_KERNEL_FILL | ATTN_KERNEL_MAKE_BLOCK_TABLE,
    .layer_kinds = BIT(ATTN_LAYER_DECODER) | BIT(ATTN_LAYER_ENCODER) | BIT(ATTN_LAYER_CROSS) |
                   BIT(ATTN_LAYER_MLA) | BIT(ATTN_LAYER_RECURRENT),
    .phases = BIT(ATTN_PHASE_PREFILL) | BIT(ATTN_PHASE_DECODE),
    .dtypes = BIT(ATTN_DTYPE_F16) | BIT(ATTN_DTYPE_BF16) | BIT(ATTN_DTYPE_F32),
    .kv_dtypes = BIT(ATTN_KV_AUTO) | BIT(ATTN_KV_F16) | BIT(ATTN_KV_BF16) | BIT(ATTN_KV_F32) |
                 BIT(ATTN_KV_FP8_E4M3) | BIT(ATTN_KV_FP8_E5M2) | BIT(ATTN_KV_FP8_PER_TOKEN_HEAD) |
                 BIT(ATTN_KV_INT8_PER_TOKEN_HEAD) | BIT(ATTN_KV_INT4_PER_TOKEN_HEAD) |
                 BIT(ATTN_KV_INT8_KV) | BIT(ATTN_KV_INT8_K) | BIT(ATTN_KV_NVFP4) |
                 BIT(ATTN_KV_FP8_DS_MLA) | BIT(ATTN_KV_TURBOQUANT_K8V4) |
                 BIT(ATTN_KV_TURBOQUANT_4BIT_NC) | BIT(ATTN_KV_TURBOQUANT_K3V4_NC) |
                 BIT(ATTN_KV_TURBOQUANT_3BIT_NC),
    .q_dtypes = BIT(ATTN_DTYPE_FP8_E4M3) | BIT(ATTN_DTYPE_FP8_E5M2) | BIT(ATTN_DTYPE_INT8),
    .terms = ATTN_TERM_CAUSAL | ATTN_TERM_BIDIRECTIONAL | ATTN_TERM_CAUSAL_PER_REQUEST |
             ATTN_TERM_SLIDING_WINDOW | ATTN_TERM_SYMMETRIC_WINDOW | ATTN_TERM_CHUNKED_LOCAL |
             ATTN_TERM_SOFT_CAP | ATTN_TERM_ALIBI | ATTN_TERM_ALIBI_SQRT | ATTN_TERM_SINKS |
             ATTN_TERM_PREFIX_LM | ATTN_TERM_TREE_BITS | ATTN_TERM_TREE_BIAS,
    .features = ATTN_FEATURE_PAGED_KV | ATTN_FEATURE_CONTIGUOUS_KV | ATTN_FEATURE_LSE |
                ATTN_FEATURE_BLOCK_TABLE_ROW | ATTN_FEATURE_MIXED_BATCH |
                ATTN_FEATURE_UPDATE_BLOCK_TABLE | ATTN_FEATURE_DEVICE_SEQ_LENS |
                ATTN_FEATURE_HOST_BOUNDS | ATTN_FEATURE_FUSED_ROPE | ATTN_FEATURE_FUSED_ROPE_NORM |
                ATTN_FEATURE_BATCH_INVARIANT | ATTN_FEATURE_QUANTIZED_QUERY |
                ATTN_FEATURE_FAST_PREFILL | ATTN_FEATURE_MXFP4_WEIGHTS,
    .view_forms = ATTN_VIEW_NHD | ATTN_VIEW_HND | ATTN_VIEW_PACKED | ATTN_VIEW_SEPARATE_STRIDES |
                  ATTN_VIEW_LATENT,
    .layouts = BIT(ATTN_KV_LAYOUT_NHD) | BIT(ATTN_KV_LAYOUT_HND) | BIT(ATTN_KV_LAYOUT_NHD_INNER) |
               BIT(ATTN_KV_LAYOUT_HND_INNER) | BIT(ATTN_KV_LAYOUT_HND_ROWS) |
               BIT(ATTN_KV_LAYOUT_PACKED_K) | BIT(ATTN_KV_LAYOUT_LATENT),
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

const struct attn_kernels gpu_kernels = {
    .struct_size = sizeof gpu_kernels,
    .attend = gpu_attend,
    .attend_mla = gpu_attend_mla,
    .attend_mla_sparse = gpu_attend_mla_sparse,
    .gated_delta = gpu_gated_delta,
    .batched_gemm = gpu_batched_gemm,
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
    .schedule_size = gpu_schedule_size,
    .schedule = gpu_make_schedule,
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
    .make_block_table = gpu_make_block_table,
};

/* Latent rows are plain numbers or fp8_ds_mla's, and only they are. */
static void supports_latent(const struct attn_layer_desc *layer,
                            const struct attn_reason_sink *reasons)
{
    char asked[64];
    bool ds_mla = layer->kv_dtype == ATTN_KV_FP8_DS_MLA;
    snprintf(asked, sizeof asked, "%d", layer->kv_dtype);
    if (gpu_is_latent(layer) && !ds_mla && number_of_kv(layer->kv_dtype) < 0) {
        reasons->refuse(reasons->user, "kv_dtype", asked,
                        "f16, bf16, f32, fp8_e4m3, fp8_e5m2, fp8_ds_mla in MLA layers");
    }
    if (!gpu_is_latent(layer) && ds_mla) {
        reasons->refuse(reasons->user, "kv_dtype", "fp8_ds_mla", "in MLA layers only");
    }
    if (gpu_is_latent(layer) && ds_mla && layer->head_size != LATENT_MAX_SIZE) {
        snprintf(asked, sizeof asked, "%d", layer->head_size);
        reasons->refuse(reasons->user, "head_size", asked, "512 + 64 with kv_dtype fp8_ds_mla");
    }
    if (gpu_is_latent(layer) && layer->p_scale_form != ATTN_SCALE_NONE) {
        reasons->refuse(reasons->user, "p_scale_form", "over latent rows", "over keys and values");
    }
}

attn_status gpu_supports(const struct attn_supports_args *args,
                         const struct attn_reason_sink *reasons, struct attn_error *error)
{
    const struct attn_layer_desc *layer = args->layer;
    char asked[64];
    int32_t v = layer->head_size_v > 0 ? layer->head_size_v : layer->head_size;
    (void)error;
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
    if (turboquant_bits(layer->kv_dtype, false) > 0 &&
        (layer->head_size & (layer->head_size - 1)) != 0) {
        reasons->refuse(reasons->user, "head_size", asked,
                        "powers of two for rotated keys of TurboQuant");
    }
    supports_latent(layer, reasons);
    if (layer->p_scale_form != ATTN_SCALE_NONE && layer->sink_len > 0) {
        reasons->refuse(reasons->user, "p_scale_form", "with a static sink",
                        "where a row is attended as a whole");
    }
    if (layer->kv_dtype == ATTN_KV_INT8_K && layer->dtype == ATTN_DTYPE_F32) {
        reasons->refuse(reasons->user, "dtype", "f32", "f16, bf16 with kv_dtype int8_k");
    }
    return ATTN_OK;
}

attn_status gpu_report(const struct attn_probe_sink *sink, const struct attn_device_info *info,
                       const struct attn_backend_caps *caps)
{
    attn_status status = sink->device(sink->user, info);
    if (status != ATTN_OK || caps == NULL) {
        return status;
    }
    struct attn_backend_caps mine = *caps;
    mine.name = gpu_vendor.name;
    mine.device = info->device;
    return sink->backend(sink->user, &mine);
}

attn_status gpu_create(const struct attn_create_args *args, attn_instance **instance,
                       const struct attn_kernels **kernels, struct attn_error *error)
{
    *instance = NULL;
    *kernels = NULL;
    if (strcmp(args->backend, gpu_vendor.name) != 0 || args->variant[0] != '\0' ||
        args->device.type != gpu_vendor.device_type) {
        return plugin_error(error, ATTN_ERROR_NOT_FOUND, "backend",
                            "%s@%s on device type %d; %s on type %d is here", args->backend,
                            args->variant, args->device.type, gpu_vendor.name,
                            gpu_vendor.device_type);
    }
    if (args->num_options > 0) {
        return plugin_refuse_option(args, error);
    }
    struct attn_instance *made = args->host->allocate(args->host->user, sizeof *made, 64);
    if (made == NULL) {
        return plugin_error(error, ATTN_ERROR_OUT_OF_MEMORY, "instance", "%zu bytes", sizeof *made);
    }
    *made = (struct attn_instance){
        .host = args->host,
        .kernels = gpu_vendor.kernels,
        .device = {.native_device = args->native_device, .native_context = args->native_context}};
    const char *cause = gpu_device_open(&made->device, args->device.id);
    if (cause == NULL && gpu_vendor.add_kernels != NULL) {
        cause = gpu_vendor.add_kernels(made);
    }
    if (cause != NULL) {
        args->host->release(args->host->user, made, sizeof *made);
        return plugin_error(error, ATTN_ERROR_DEVICE, "device", "device %d: %s", args->device.id,
                            cause);
    }
    *instance = made;
    *kernels = made->kernels;
    return ATTN_OK;
}

void gpu_destroy(attn_instance *instance)
{
    if (instance != NULL) {
        gpu_device_close(&instance->device);
        instance->host->release(instance->host->user, instance, sizeof *instance);
    }
}
