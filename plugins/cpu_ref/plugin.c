/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_ref: every feature, plain and slow: the definition of right. */
#include <attn/indexer.h>
#include <string.h>

#include "common/cpu_device.h"
#include "common/compressor.h"
#include "common/declared.h"
#include "reference.h"

static const struct attn_indexer_caps indexer_caps = {
    COMMON_INDEXER_CAPS(REF_MAX_TOPK, REF_MAX_FORCED)};
static const struct attn_compressed_caps compressed_caps = {
    .ext = {ATTN_EXT_DRAFT_COMPRESSED_CAPS, 0, sizeof compressed_caps, &indexer_caps.ext},
    .kv_dtypes = COMMON_PLAIN_KV_DTYPES | BIT(ATTN_KV_FP8_DS_V4),
    .dtypes = BIT(ATTN_DTYPE_F16) | BIT(ATTN_DTYPE_BF16) | BIT(ATTN_DTYPE_F32)};
static const struct attn_recurrent_rule_caps rule_caps = {COMMON_RULE_CAPS(&compressed_caps.ext)};
static const struct attn_index_lists_caps list_caps = {
    COMMON_LISTS_CAPS(&rule_caps.ext),
    .groups = BIT(ATTN_LISTS_SHARED) | BIT(ATTN_LISTS_PER_KV_HEAD) | BIT(ATTN_LISTS_PER_Q_HEAD),
    .physical_slots = 1};
static const struct attn_recurrent_caps gdn_caps = {COMMON_RECURRENT_CAPS(&list_caps.ext)};
static const struct attn_mla_caps mla_caps = {COMMON_MLA_CAPS(gdn_caps)};

static const struct attn_backend_caps caps = {
    COMMON_CAPS,
    .next = &mla_caps.ext,
    .name = "cpu_ref",
    .variant = "",
    .device = {ATTN_DEVICE_CPU, 0},
    .kernels = COMMON_KERNELS,
    .layer_kinds = COMMON_LAYER_KINDS | BIT(ATTN_LAYER_INDEXER) | BIT(ATTN_LAYER_DRAFT_COMPRESSOR),
    .kv_dtypes = COMMON_KV_DTYPES | BIT(ATTN_KV_FP8_E4M3FNUZ) | BIT(ATTN_KV_Q8_0) |
                 BIT(ATTN_KV_Q4_0) | BIT(ATTN_KV_FP8_DS_V4) | BIT(ATTN_KV_MXFP4),
    .terms = (ATTN_TERM_TREE_BIAS << 1) - 1,
    .features = COMMON_FEATURES | ATTN_FEATURE_KV_DTYPE_V,
    .block_sizes = &(const struct attn_range){1, 4096, 1},
    .preferred_layout = ATTN_KV_LAYOUT_NHD,
    .preferred_block_size = 16,
    .decode_write_kv_dtypes = REF_DECODE_WRITES,
    .cache_roles = BIT(ATTN_CACHE_REPLAY),
};

static attn_status attend(const struct attn_attend_args *args, struct attn_error *error)
{
    return args->layer->kind == ATTN_LAYER_INDEXER ? ref_index(args, error)
           : args->layer->kind == ATTN_LAYER_DRAFT_COMPRESSOR
               ? compressor_attend(args, args->instance->host)
               : ref_attend(args, error);
}

static attn_status write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    return args->layer->kind == ATTN_LAYER_DRAFT_COMPRESSOR
               ? compressor_write(args, args->instance->host)
               : ref_write_kv(args, error);
}

static const struct attn_kernels kernels = {
    .struct_size = sizeof kernels,
    .attend = attend,
    .write_kv = write_kv,
    .merge_states = ref_merge_states,
    .attend_mla = ref_attend_mla,
    .attend_mla_sparse = ref_attend_mla_sparse,
    .recurrent = ref_recurrent,
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
    const struct attn_device_info device = cpu_device("");
    attn_status status = sink->device(sink->user, &device, error);
    if (status == ATTN_OK) {
        status = sink->backend(sink->user, &caps, error);
    }
    if (status != ATTN_OK) {
        return plugin_error(error, status, "probe", "the sink refused what cpu_ref declares");
    }
    return ATTN_OK;
}

static attn_status ref_supports(const struct attn_supports_args *args,
                                const struct attn_reason_sink *reasons, struct attn_error *error)
{
    refuse_rows(args, reasons);
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
