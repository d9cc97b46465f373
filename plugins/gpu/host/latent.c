/* SPDX-License-Identifier: Apache-2.0 */
/* The slots of MLA (attn/mla.h): attends over latent rows, and their writing and gathering. */
#include <attn/mla.h>

#include "gpu/host/schedule.h"
#include "gpu/latent.h"

static const struct attn_mla_desc *mla_of(const struct attn_layer_desc *layer)
{
    return (const struct attn_mla_desc *)gpu_find_ext(layer->next, ATTN_EXT_MLA_DESC);
}

bool gpu_is_latent(const struct attn_layer_desc *layer)
{
    return layer != NULL && layer->kind == ATTN_LAYER_MLA;
}

static attn_status check_layer(const struct attn_layer_desc *layer, struct attn_error *error)
{
    const struct attn_mla_desc *mla = gpu_is_latent(layer) ? mla_of(layer) : NULL;
    if (mla == NULL) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "attn_mla_desc",
                            "the layer is NULL, of kind %d, or has no attn_mla_desc",
                            layer != NULL ? layer->kind : -1);
    }
    if (mla->kv_lora_rank <= 0 || mla->kv_lora_rank > LATENT_MAX_RANK ||
        mla->qk_rope_head_dim < 0 || layer->num_kv_heads != 1 ||
        layer->head_size != mla->kv_lora_rank + mla->qk_rope_head_dim ||
        layer->head_size > LATENT_MAX_SIZE) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "head_size",
                            "%d over %d KV heads, for a latent of %d and a rope part of %d; their "
                            "sum over 1 is needed, up to %d of at most %d latent",
                            layer->head_size, layer->num_kv_heads, mla->kv_lora_rank,
                            mla->qk_rope_head_dim, LATENT_MAX_SIZE, LATENT_MAX_RANK);
    }
    return ATTN_OK;
}

/* The cache of latent rows as kernels take it. */
static attn_status enter_cache(const struct attn_layer_desc *layer,
                               const struct attn_layer_params *params,
                               const struct attn_kv_view *view, struct gpu_cache *cache,
                               struct attn_error *error)
{
    bool is_ds = layer->kv_dtype == ATTN_KV_FP8_DS_MLA;
    if (params == NULL || view == NULL || view->data == NULL || view->block_size <= 0 ||
        view->num_heads != 1 || view->head_size != layer->head_size ||
        (view->pack > 0 && view->pack < view->head_size)) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "k_cache",
                            "is NULL, or params are, or it has not rows of %d in one piece",
                            layer->head_size);
    }
    if (is_ds
            ? layer->head_size != LATENT_MAX_SIZE || mla_of(layer)->kv_lora_rank != LATENT_MAX_RANK
            : number_of_kv(layer->kv_dtype) < 0) {
        return plugin_error(error, ATTN_ERROR_UNSUPPORTED, "kv_dtype",
                            "kv_dtype %d, head size %d; latent rows are f16, bf16, f32, fp8_e4m3, "
                            "fp8_e5m2, or fp8_ds_mla of 512 + 64",
                            layer->kv_dtype, layer->head_size);
    }
    *cache = gpu_cache_of(layer, params, view, false);
    if (is_ds) {
        cache->form = GPU_ROW_DS_MLA;
        cache->dtype = ATTN_DTYPE_FP8_E4M3;
    }
    return ATTN_OK;
}

/* A part of new keys, [T, size]; `joined`: a [T, 1, size] tensor's from element `first` on. */
static attn_status enter_part(const struct attn_tensor *tensor, const char *name, int64_t size,
                              struct gpu_tensor *part, struct attn_error *error)
{
    if (tensor == NULL || tensor->data == NULL || tensor->shape == NULL || tensor->ndim < 2 ||
        tensor->ndim > 3 || tensor->shape[tensor->ndim - 1] != size ||
        tensor_stride(tensor, tensor->ndim - 1) != 1 || number_dtype_name(tensor->dtype) < 0) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, name,
                            "is NULL or not rows of %lld contiguous numbers", (long long)size);
    }
    *part = gpu_tensor_of(tensor);
    return ATTN_OK;
}

/* Rows that come as one tensor, or as a latent and a rope part. */
static attn_status enter_rows(const struct attn_tensor *joined, const char *name,
                              const struct attn_tensor *const parts[2],
                              const char *const part_names[2], const struct attn_mla_desc *mla,
                              struct gpu_tensor *latent, struct gpu_tensor *rope,
                              struct attn_error *error)
{
    int32_t rank = mla->kv_lora_rank, size = mla->qk_rope_head_dim;
    attn_status status;
    if (joined != NULL) {
        status = enter_part(joined, name, rank + size, latent, error);
        *rope = *latent;
        rope->data += status == ATTN_OK ? (int64_t)rank * number_bytes(latent->dtype) : 0;
        return status;
    }
    status = enter_part(parts[0], part_names[0], rank, latent, error);
    *rope = *latent; /* without a rope part its tensor may be absent */
    return status == ATTN_OK && size > 0 ? enter_part(parts[1], part_names[1], size, rope, error)
                                         : status;
}

static attn_status check_latent_attend(const struct attn_attend_args *args, bool sparse,
                                       struct attn_error *error)
{
    const struct attn_batch *batch = args->batch;
    attn_status status = check_layer(args->layer, error);
    status = status ? status : gpu_check_tensor(args->out, "out", error);
    if (status != ATTN_OK) {
        return status;
    }
    if (batch == NULL || args->prepared == NULL ||
        (args->schedule_host == NULL && args->prepared->way == GPU_WAY_LATENT) ||
        batch->query_start_loc == NULL || batch->seq_lens == NULL || batch->block_table == NULL) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "batch",
                            "attend_mla needs a plan, query_start_loc, seq_lens and block_table; "
                            "one is NULL");
    }
    if (args->layer->p_scale_form != ATTN_SCALE_NONE || args->layer->sink_len > 0) {
        return plugin_error(error, ATTN_ERROR_UNSUPPORTED, "p_scale_form",
                            "p_scale_form %d, sink_len %d; 0 of both over latent rows",
                            args->layer->p_scale_form, args->layer->sink_len);
    }
    const struct attn_io_mla *io =
        (const struct attn_io_mla *)gpu_find_ext(args->next, ATTN_EXT_IO_MLA);
    int32_t topk = mla_of(args->layer)->topk;
    if (sparse && (io == NULL || io->topk_indices == NULL || topk <= 0 || io->topk_stride < topk)) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "topk_indices",
                            "%p, of %d; a sparse layer's topk from 1, and rows of at least that",
                            io != NULL ? (const void *)io->topk_indices : NULL, topk);
    }
    return ATTN_OK;
}

static attn_status attend_latent(const struct attn_attend_args *args, bool sparse,
                                 struct attn_error *error)
{
    static const char *const names[] = {"q_nope", "q_pe"};
    struct gpu_latent_params p = {0};
    attn_status status = check_latent_attend(args, sparse, error);
    status =
        status ? status : enter_cache(args->layer, args->params, args->k_cache, &p.attend.k, error);
    if (status != ATTN_OK || args->batch->num_reqs == 0) {
        return status;
    }
    const struct attn_mla_desc *mla = mla_of(args->layer);
    const struct attn_io_mla *io =
        (const struct attn_io_mla *)gpu_find_ext(args->next, ATTN_EXT_IO_MLA);
    const struct attn_tensor *const parts[2] = {io != NULL ? io->q_nope : NULL,
                                                io != NULL ? io->q_pe : NULL};
    struct gpu_tensor latent, rope;
    status = enter_rows(args->q, "q", parts, names, mla, &latent, &rope, error);
    if (status != ATTN_OK) {
        return status;
    }
    set_problem(&p.attend.problem, args);
    p.attend.q = latent;
    p.q_rope = rope;
    p.attend.out = gpu_tensor_of(args->out);
    p.attend.lse = gpu_lse_of(args->lse);
    set_query_scale(&p.attend, args);
    p.rank = mla->kv_lora_rank;
    p.rope = mla->qk_rope_head_dim;
    const struct gpu_device *device = &args->instance->device;
    const struct schedule_host *plan = args->schedule_host;
    if (sparse) {
        p.topk = io->topk_indices;
        p.topk_stride = io->topk_stride;
        p.num_topk = mla->topk;
    }
    if (sparse && (args->prepared->way != GPU_WAY_LATENT || !plan->fast)) {
        return device_status(gpu_device_launch(device, GPU_KERNEL_latent_sparse,
                                               (int64_t)device->num_sms * 2, &p, args->stream),
                             "attend_mla_sparse", error);
    }
    set_schedule(&p.attend.schedule, args);
    if (plan->fast) {
        return device_status(args->instance->latent->attend(args, &p), "attend_mla", error);
    }
    return device_status(
        gpu_device_launch(device, GPU_KERNEL_latent, p.attend.schedule.ctas, &p, args->stream),
        "attend_mla", error);
}

attn_status gpu_attend_mla(const struct attn_attend_args *args, struct attn_error *error)
{
    return attend_latent(args, false, error);
}

attn_status gpu_attend_mla_sparse(const struct attn_attend_args *args, struct attn_error *error)
{
    return attend_latent(args, true, error);
}

attn_status gpu_write_latent(const struct attn_write_kv_args *args, struct attn_error *error)
{
    static const char *const names[] = {"kv_c", "k_pe"};
    struct gpu_latent_write_params p = {0};
    attn_status status = check_layer(args->layer, error);
    status = status ? status : enter_cache(args->layer, args->params, args->k_cache, &p.to, error);
    if (status == ATTN_OK && args->slot_mapping == NULL && args->num_slots > 0) {
        status = plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "slot_mapping", "is NULL");
    }
    if (status != ATTN_OK || args->num_slots <= 0) {
        return status;
    }
    const struct attn_mla_desc *mla = mla_of(args->layer);
    const struct attn_io_mla *io =
        (const struct attn_io_mla *)gpu_find_ext(args->next, ATTN_EXT_IO_MLA);
    const struct attn_tensor *const parts[2] = {io != NULL ? io->kv_c : NULL,
                                                io != NULL ? io->k_pe : NULL};
    status = enter_rows(args->k, "k", parts, names, mla, &p.latent, &p.rope, error);
    if (status != ATTN_OK) {
        return status;
    }
    p.slots = args->slot_mapping;
    p.num_slots = args->num_slots;
    p.rank = mla->kv_lora_rank;
    p.block_size = args->k_cache->block_size;
    const struct gpu_device *device = &args->instance->device;
    return device_status(
        gpu_device_launch(device, GPU_KERNEL_latent_write,
                          gpu_warp_groups(device, GPU_THREADS_latent_write, p.num_slots, 32), &p,
                          args->stream),
        "write_kv", error);
}

attn_status gpu_gather_latent(const struct attn_gather_kv_args *args,
                              const struct gpu_gather_params *gather, struct attn_error *error)
{
    struct gpu_latent_gather_params p = {.gather = *gather};
    attn_status status = check_layer(args->layer, error);
    status = status ? status
                    : enter_cache(args->layer, args->params, args->cache, &p.gather.from, error);
    if (status != ATTN_OK || gather->num_reqs <= 0) {
        return status;
    }
    p.rank = mla_of(args->layer)->kv_lora_rank;
    const struct gpu_device *device = &args->instance->device;
    return device_status(gpu_device_launch(device, GPU_KERNEL_latent_gather,
                                           (int64_t)device->num_sms * 16, &p, args->stream),
                         "gather_kv", error);
}
