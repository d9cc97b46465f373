/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_simd: the fast CPU backend. The entry, instances, and what is prepared per layer. */
#include "common/compressor.h"
#include "common/entry.h"
#include "common/recurrent.h"
#include "cpu_simd/internal.h"

static attn_status simd_prepare(const struct attn_prepare_args *args, attn_prepared **prepared,
                                struct attn_error *error)
{
    attn_instance *instance = args->instance;
    const struct attn_layer_desc *layer = args->layer;
    const struct attn_host *host = instance->host;
    struct attn_prepared *made = host->allocate(host->user, sizeof *made, 64);
    *prepared = made;
    if (made == NULL) {
        return plugin_error(error, ATTN_ERROR_OUT_OF_MEMORY, "prepared", "%zu bytes", sizeof *made);
    }
    *made = (struct attn_prepared){.is_gdn = layer->kind == ATTN_LAYER_RECURRENT,
                                   .compresses = layer->kind == ATTN_LAYER_DRAFT_COMPRESSOR};
    if (made->is_gdn) {
        made->gdn =
            *(const struct attn_recurrent_desc *)ext_of(layer->next, ATTN_EXT_RECURRENT_DESC);
    } else if (!made->compresses) {
        made->shape = shape_of_layer(instance->variant, layer);
    }
    if (indexer_of(layer) != NULL) {
        made->indexer = *indexer_of(layer);
    }
    return ATTN_OK;
}

static void simd_release(attn_instance *instance, attn_prepared *prepared)
{
    if (prepared != NULL) {
        instance->host->release(instance->host->user, prepared, sizeof(*prepared));
    }
}

static attn_status simd_schedule_size(const struct attn_schedule_size_args *args,
                                      struct attn_schedule_size *size, struct attn_error *error)
{
    const attn_prepared *prepared = args->prepared;
    const struct attn_limits *limits = args->limits;
    int32_t threads = args->instance->host->num_threads;
    if (prepared->compresses) {
        size->host_bytes = size->scratch_bytes = 0;
        return ATTN_OK;
    }
    if (prepared->is_gdn) {
        size->host_bytes = 0;
        size->scratch_bytes = gdn_workspace_bytes(&prepared->gdn, threads);
        return ATTN_OK;
    }
    if (prepared->indexer.topk > 0) {
        size->host_bytes = 0;
        size->scratch_bytes = index_workspace_bytes(&prepared->shape, &prepared->indexer, threads);
        return ATTN_OK;
    }
    size->host_bytes = schedule_bytes(&prepared->shape, limits, threads);
    size->scratch_bytes = workspace_bytes(&prepared->shape, limits, threads);
    return ATTN_OK;
}

static attn_status simd_schedule(const struct attn_attend_args *args, int32_t mode,
                                 struct attn_error *error)
{
    if (args->layer->kind == ATTN_LAYER_RECURRENT || args->layer->kind == ATTN_LAYER_INDEXER ||
        args->layer->kind == ATTN_LAYER_DRAFT_COMPRESSOR) {
        return ATTN_OK; /* nothing is planned: items are heads, chunks of queries, or tokens */
    }
    return layer_is_latent(args->layer) ? simd_plan_latent(args, error)
                                        : plan_attend(args, NULL, error);
}

/* Lengths are the same: the schedule stays right. */
static attn_status simd_update_block_table(const struct attn_attend_args *args,
                                           struct attn_error *error)
{
    return ATTN_OK;
}

static attn_status attend(const struct attn_attend_args *args, struct attn_error *error)
{
    const int32_t kind = args->layer->kind;
    return kind == ATTN_LAYER_INDEXER            ? simd_index(args, error)
           : kind == ATTN_LAYER_DRAFT_COMPRESSOR ? compressor_attend(args, args->instance->host)
                                                 : simd_attend(args, error);
}

static attn_status write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    return args->layer->kind == ATTN_LAYER_DRAFT_COMPRESSOR
               ? compressor_write(args, args->instance->host)
               : simd_write_kv(args, error);
}

static const struct attn_kernels kernels = {
    .struct_size = sizeof(struct attn_kernels),
    .attend = attend,
    .write_kv = write_kv,
    .merge_states = simd_merge_states,
    .attend_mla = simd_attend_mla,
    .attend_mla_sparse = simd_attend_mla,
    .recurrent = simd_recurrent,
    .rope_write_kv = simd_rope_write_kv,
    .gather_kv = simd_gather_kv,
    .batched_gemm = simd_batched_gemm,
    .quantize = simd_quantize,
    .amax = simd_amax,
    .copy_blocks = simd_copy_blocks,
    .copy = simd_copy,
    .fill = simd_fill,
    .prepare = simd_prepare,
    .release = simd_release,
    .schedule_size = simd_schedule_size,
    .schedule = simd_schedule,
    .update_block_table = simd_update_block_table,
};

static attn_status simd_create(const struct attn_create_args *args, attn_instance **instance,
                               const struct attn_kernels **table, struct attn_error *error)
{
    *instance = NULL;
    *table = NULL;
    const struct variant *found = variant_by_name(args->variant);
    if (strcmp(args->backend, "cpu_simd") != 0 || args->device.type != ATTN_DEVICE_CPU) {
        return plugin_error(error, ATTN_ERROR_NOT_FOUND, "backend",
                            "%s on device type %d; here is cpu_simd on type %d", args->backend,
                            args->device.type, ATTN_DEVICE_CPU);
    }
    if (found == NULL) {
        return plugin_error(error, ATTN_ERROR_NOT_FOUND, "variant",
                            "%s is not one of this machine's variants", args->variant);
    }
    if (args->num_options > 0) {
        return plugin_refuse_option(args, error);
    }
    attn_instance *made = args->host->allocate(args->host->user, sizeof(*made), 64);
    if (made == NULL) {
        return plugin_error(error, ATTN_ERROR_OUT_OF_MEMORY, "instance", "%zu bytes", sizeof *made);
    }
    made->host = args->host;
    made->variant = found;
    *instance = made;
    *table = &kernels;
    return ATTN_OK;
}

static void simd_destroy(attn_instance *instance)
{
    if (instance != NULL) {
        instance->host->release(instance->host->user, instance, sizeof(*instance));
    }
}

PLUGIN_ENTRY("cpu_simd", simd_probe, simd_supports, simd_create, simd_destroy)
