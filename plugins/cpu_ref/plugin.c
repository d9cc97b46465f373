/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_ref: every feature, plain and slow: the definition of right. */
#include <attn/mla.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/entry.h"
#include "common/turboquant.h"
#include "common/tensors.h"
#include "gdn.h"
#include "reference.h"

static const struct attn_head_size_range head_sizes[] = {{{8, 512, 8}, {8, 512, 8}, 0}};
static const struct attn_range block_sizes[] = {{1, 4096, 1}};

static const struct attn_recurrent_caps gdn_caps = {
    .ext = {ATTN_EXT_CAPS_RECURRENT, 0, sizeof gdn_caps, NULL},
    .head_size_k_max = GDN_MAX_HEAD_SIZE,
    .head_size_v_max = GDN_MAX_HEAD_SIZE,
    .conv_width_max = GDN_MAX_CONV_WIDTH,
    .max_speculative_tokens = GDN_MAX_DRAFTED - 1,
    .initial_slots = 1,
    .checkpoints = 1,
};

static const struct attn_mla_caps mla_caps = {
    .ext = {ATTN_EXT_CAPS_MLA, 0, sizeof mla_caps, &gdn_caps.ext},
    .kv_lora_rank_max = 512,
    .qk_rope_head_dim_max = 64,
    .num_q_heads_multiple = 1,
    .topk_max = 1 << 20,
    .topk_multiple = 1,
};

static const struct attn_backend_caps caps = {
    .struct_size = sizeof caps,
    .next = &mla_caps.ext,
    .name = "cpu_ref",
    .variant = "",
    .version = PLUGIN_VERSION,
    .vendor = "libattn",
    .device = {ATTN_DEVICE_CPU, 0},
    .kernels = ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV | ATTN_KERNEL_MERGE_STATES |
               ATTN_KERNEL_ROPE_WRITE_KV | ATTN_KERNEL_ATTEND_MLA | ATTN_KERNEL_ATTEND_MLA_SPARSE |
               ATTN_KERNEL_GATED_DELTA | ATTN_KERNEL_GATHER_KV | ATTN_KERNEL_BATCHED_GEMM |
               ATTN_KERNEL_QUANTIZE | ATTN_KERNEL_AMAX | ATTN_KERNEL_COPY_BLOCKS |
               ATTN_KERNEL_COPY | ATTN_KERNEL_FILL,
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
                 BIT(ATTN_KV_TURBOQUANT_3BIT_NC) | BIT(ATTN_KV_Q8_0) | BIT(ATTN_KV_Q4_0),
    .q_dtypes = BIT(ATTN_DTYPE_FP8_E4M3) | BIT(ATTN_DTYPE_FP8_E5M2) | BIT(ATTN_DTYPE_INT8),
    .terms = BIT(ATTN_TERM_COUNT) - 1,
    .features = ATTN_FEATURE_PAGED_KV | ATTN_FEATURE_CONTIGUOUS_KV | ATTN_FEATURE_LSE |
                ATTN_FEATURE_BLOCK_TABLE_ROW | ATTN_FEATURE_MIXED_BATCH |
                ATTN_FEATURE_UPDATE_BLOCK_TABLE | ATTN_FEATURE_FUSED_ROPE |
                ATTN_FEATURE_FUSED_ROPE_NORM | ATTN_FEATURE_BATCH_INVARIANT |
                ATTN_FEATURE_BATCH_INVARIANT_PREFIX | ATTN_FEATURE_QUANTIZED_QUERY |
                ATTN_FEATURE_DEVICE_SEQ_LENS | ATTN_FEATURE_HOST_BOUNDS |
                ATTN_FEATURE_FAST_PREFILL | ATTN_FEATURE_FP8_INPUTS | ATTN_FEATURE_MXFP4_WEIGHTS,
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
    .preferred_layout = ATTN_KV_LAYOUT_NHD,
    .preferred_block_size = 16,
    .graph_level = ATTN_GRAPH_ALWAYS, /* lengths, tables and slots are read when a step runs */
    .graph_fill_seq_len = 1,
    .reorder_threshold = 1,
    .rank = {0, 0},
    .decode_write_kv_dtypes = REF_DECODE_WRITES,
};

static const struct attn_kernels kernels = {
    .struct_size = sizeof kernels,
    .attend = ref_attend,
    .write_kv = ref_write_kv,
    .merge_states = ref_merge_states,
    .attend_mla = ref_attend_mla,
    .attend_mla_sparse = ref_attend_mla_sparse,
    .gated_delta = ref_gated_delta,
    .rope_write_kv = ref_rope_write_kv,
    .gather_kv = ref_gather_kv,
    .batched_gemm = ref_batched_gemm,
    .quantize = ref_quantize,
    .amax = ref_amax,
    .copy_blocks = ref_copy_blocks,
    .copy = ref_copy,
    .fill = ref_fill,
    .update_block_table = ref_update_block_table,
};

static attn_status ref_probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                             struct attn_error *error)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    const struct attn_device_info device = {
        .struct_size = sizeof device,
        .device = {ATTN_DEVICE_CPU, 0},
        .name = "CPU",
#if defined(__aarch64__)
        .arch = "aarch64",
#else
        .arch = "x86-64",
#endif
        .isa = "",
        .num_multiprocessors = cores > 0 ? (int32_t)cores : 1,
        .memory_bytes = pages > 0 ? (int64_t)pages * page_bytes : 0,
    };
    attn_status status = sink->device(sink->user, &device);
    (void)host;
    if (status == ATTN_OK) {
        status = sink->backend(sink->user, &caps);
    }
    if (status != ATTN_OK) {
        return plugin_error(error, status, "probe", "the sink refused what cpu_ref declares");
    }
    return ATTN_OK;
}

/* Latent rows are plain numbers or fp8_ds_mla's, and only they are. */
static void supports_latent(const struct attn_layer_desc *layer,
                            const struct attn_reason_sink *reasons)
{
    const uint64_t plain = BIT(ATTN_KV_F16) | BIT(ATTN_KV_BF16) | BIT(ATTN_KV_F32) |
                           BIT(ATTN_KV_FP8_E4M3) | BIT(ATTN_KV_FP8_E5M2);
    char asked[64];
    bool ds_mla = layer->kv_dtype == ATTN_KV_FP8_DS_MLA;
    snprintf(asked, sizeof asked, "%d", layer->kv_dtype);
    if (layer_is_latent(layer) && !ds_mla && !(plain >> layer->kv_dtype & 1)) {
        reasons->refuse(reasons->user, "kv_dtype", asked,
                        "f16, bf16, f32, fp8_e4m3, fp8_e5m2, fp8_ds_mla in MLA layers");
    }
    if (!layer_is_latent(layer) && ds_mla) {
        reasons->refuse(reasons->user, "kv_dtype", "fp8_ds_mla", "in MLA layers only");
    }
    if (layer_is_latent(layer) && ds_mla && layer->head_size != 576) {
        snprintf(asked, sizeof asked, "%d", layer->head_size);
        reasons->refuse(reasons->user, "head_size", asked, "512 + 64 with kv_dtype fp8_ds_mla");
    }
}

/* What the masks cannot say: rows of some quantized caches split only at certain sizes. */
static attn_status ref_supports(const struct attn_supports_args *args,
                                const struct attn_reason_sink *reasons, struct attn_error *error)
{
    const struct attn_layer_desc *layer = args->layer;
    char asked[64];
    (void)error;
    int32_t v = layer->head_size_v > 0 ? layer->head_size_v : layer->head_size;
    snprintf(asked, sizeof asked, "%d, %d", layer->head_size, v);
    if (layer->kv_dtype == ATTN_KV_INT4_PER_TOKEN_HEAD &&
        ((layer->head_size & (layer->head_size - 1)) != 0 || (v & (v - 1)) != 0)) {
        reasons->refuse(reasons->user, "head_size", asked,
                        "powers of two with kv_dtype int4_per_token_head");
    }
    if ((layer->kv_dtype == ATTN_KV_Q8_0 || layer->kv_dtype == ATTN_KV_Q4_0) &&
        (layer->head_size % REF_BLOCK != 0 || v % REF_BLOCK != 0)) {
        reasons->refuse(reasons->user, "head_size", asked,
                        "multiples of 32 with kv_dtype q8_0 and q4_0");
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
    if (layer->kv_dtype == ATTN_KV_INT8_K && layer->dtype == ATTN_DTYPE_F32) {
        reasons->refuse(reasons->user, "dtype", "f32", "f16, bf16 with kv_dtype int8_k");
    }
    return ATTN_OK;
}

static attn_status ref_create(const struct attn_create_args *args, attn_instance **instance,
                              const struct attn_kernels **table, struct attn_error *error)
{
    *instance = NULL;
    *table = NULL;
    const char *variant = args->variant != NULL ? args->variant : "";
    if (args->backend == NULL || strcmp(args->backend, caps.name) != 0 || variant[0] != '\0' ||
        args->device.type != ATTN_DEVICE_CPU) {
        return plugin_error(error, ATTN_ERROR_NOT_FOUND, "backend",
                            "%s@%s on device type %d; cpu_ref on type %d is here",
                            args->backend != NULL ? args->backend : "(NULL)", variant,
                            args->device.type, ATTN_DEVICE_CPU);
    }
    if (args->num_options > 0) {
        return plugin_refuse_option(args, error);
    }
    *instance =
        args->host->allocate(args->host->user, sizeof **instance, _Alignof(struct attn_instance));
    if (*instance == NULL) {
        return plugin_error(error, ATTN_ERROR_OUT_OF_MEMORY, "instance", "%zu bytes",
                            sizeof **instance);
    }
    (*instance)->host = args->host;
    *table = &kernels;
    return ATTN_OK;
}

static void ref_destroy(attn_instance *instance)
{
    if (instance != NULL) {
        instance->host->release(instance->host->user, instance, sizeof *instance);
    }
}

PLUGIN_ENTRY("cpu_ref", ref_probe, ref_supports, ref_create, ref_destroy)
