/* SPDX-License-Identifier: Apache-2.0 */
/* What all backends on gpu/kernels declare, their kernel table, and their instances. */
#include "gpu/host/backend.h"

#include <attn/draft/compressor.h>
#include <attn/draft/index_lists.h>
#include <attn/indexer.h>
#include <attn/draft/output_rope.h>
#include <string.h>

#include "common/declared.h"
#include "gpu/delta.h"
#include "gpu/host/instance.h"
#include "gpu/index.h"
#include "gpu/latent.h"

ATTN_STATIC_ASSERT(GDN_MAX_HEAD_SIZE <= DELTA_MAX_HEAD_SIZE &&
                       GDN_MAX_CONV_WIDTH <= DELTA_MAX_CONV_WIDTH && LATENT_MAX_RANK >= 512 &&
                       LATENT_MAX_SIZE >= 576,
                   "what is declared fits into the kernels");
static const struct attn_indexer_caps indexer_caps = {COMMON_INDEXER_CAPS(INT32_MAX, 1024)};
static const struct attn_index_lists_caps list_caps = {
    COMMON_LISTS_CAPS(&indexer_caps.ext),
    .groups = BIT(ATTN_LISTS_SHARED) | BIT(ATTN_LISTS_PER_KV_HEAD) | BIT(ATTN_LISTS_PER_Q_HEAD)};
static const struct attn_recurrent_rule_caps rule_caps = {COMMON_RULE_CAPS(&list_caps.ext)};
static const struct attn_recurrent_caps gdn_caps = {COMMON_RECURRENT_CAPS(&rule_caps.ext)};
static const struct attn_mla_caps mla_caps = {COMMON_MLA_CAPS(gdn_caps)};

const struct attn_backend_caps gpu_caps = {
    COMMON_CAPS,
    .layer_kinds = COMMON_LAYER_KINDS | BIT(ATTN_LAYER_INDEXER) | BIT(ATTN_LAYER_DRAFT_COMPRESSOR),
    .next = &mla_caps.ext,
    .name = "",
    .variant = "",
    .kernels = COMMON_KERNELS | ATTN_KERNEL_MAKE_BLOCK_TABLE,
    .kv_dtypes = COMMON_KV_DTYPES | BIT(ATTN_KV_FP8_DS_V4) | BIT(ATTN_KV_MXFP4),
    .terms = COMMON_TERMS,
    .features = COMMON_FEATURES | ATTN_FEATURE_DRAFT_OUTPUT_ROPE,
    .block_sizes = &(const struct attn_range){1, 4096, 1},
    .preferred_layout = ATTN_KV_LAYOUT_HND,
    .preferred_block_size = 64,
    .cache_roles = BIT(ATTN_CACHE_REPLAY),
    .rank = {50, 50},
};

const struct attn_kernels gpu_kernels = {
    .struct_size = sizeof gpu_kernels,
    GPU_COMMON_SLOTS,
    .attend = gpu_attend,
    .attend_mla = gpu_attend_mla,
    .attend_mla_sparse = gpu_attend_mla,
    .recurrent = gpu_recurrent,
    .batched_gemm = gpu_batched_gemm,
    .gather_kv = gpu_gather_kv,
    .amax = gpu_amax,
    .prepare = gpu_prepare,
    .release = gpu_release,
    .schedule_size = gpu_schedule_size,
    .schedule = gpu_make_schedule,
    .update_block_table = gpu_update_block_table,
};

attn_status gpu_supports(const struct attn_supports_args *args,
                         const struct attn_reason_sink *reasons, struct attn_error *error)
{
    const struct attn_layer_desc *layer = args->layer;
    refuse_rows(args, reasons);
    if (layer_is_latent(layer) && layer->p_scale_form != ATTN_SCALE_NONE) {
        reasons->refuse(reasons->user, "p_scale_form", "over latent rows", "over keys and values");
    }
    if (layer->p_scale_form != ATTN_SCALE_NONE && layer->sink_len > 0) {
        reasons->refuse(reasons->user, "p_scale_form", "with a static sink",
                        "where a row is attended as a whole");
    }
    const struct attn_recurrent_desc *gdn = ext_of(layer->next, ATTN_EXT_RECURRENT_DESC);
    if (gdn != NULL && gdn->state_dtype != ATTN_DTYPE_F32 && layer->batch_invariant >= 2) {
        reasons->refuse(reasons->user, "batch_invariant", "2 with states of 16 bits",
                        "0, 1, or 2 with states in float32");
    }
    if (!layer_is_latent(layer)) { /* else a kernel reads the lists themselves */
        refuse_beside_lists(layer, reasons);
    }
    return ATTN_OK;
}

attn_status gpu_report(const struct attn_probe_sink *sink, const struct gpu_found *found,
                       int32_t id, const struct attn_backend_caps *caps)
{
    const struct attn_device_info info = {
        .struct_size = sizeof info,
        .device = {gpu_vendor.device_type, id},
        .name = found->name,
        .arch = found->arch,
        .isa = "",
        .compute_capability_major = found->major,
        .compute_capability_minor = found->minor,
        .num_multiprocessors = found->num_sms,
        .memory_bytes = found->memory_bytes,
        .uuid = found->uuid,
    };
    attn_status status = sink->device(sink->user, &info, NULL);
    if (status != ATTN_OK || !found->served) {
        return status;
    }
    struct attn_backend_caps mine = *caps;
    mine.name = gpu_vendor.name;
    mine.device = info.device;
    return sink->backend(sink->user, &mine, NULL);
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
