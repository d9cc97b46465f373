/* SPDX-License-Identifier: Apache-2.0 */
/* The slots of MLA (attn/mla.h): attention over latent rows, and their writing and gathering. */
#include <attn/draft/compressed.h>
#include <attn/draft/index_lists.h>
#include <attn/mla.h>

#include "gpu/host/schedule.h"
#include "gpu/latent.h"

/* The cache of latent rows as a kernel parameter. */
static attn_status enter_cache(const struct attn_layer_desc *layer,
                               const struct attn_layer_params *params,
                               const struct attn_kv_view *view, struct gpu_cache *cache,
                               struct attn_error *error)
{
    bool is_ds = layer->kv_dtype == ATTN_KV_FP8_DS_MLA;
    bool is_v4 = layer->kv_dtype == ATTN_KV_FP8_DS_V4;
    if (is_ds
            ? layer->head_size != LATENT_MAX_SIZE || mla_of(layer)->kv_lora_rank != LATENT_MAX_RANK
        : is_v4 ? layer->head_size != DS_V4_SIZE
                : number_of_kv(layer->kv_dtype) < 0) {
        return plugin_error(error, ATTN_ERROR_UNSUPPORTED, "kv_dtype",
                            "kv_dtype %d, head size %d; latent rows are f16, bf16, f32, fp8_e4m3, "
                            "fp8_e5m2, fp8_ds_mla of 512 + 64, or fp8_ds_v4 of 512",
                            layer->kv_dtype, layer->head_size);
    }
    *cache = gpu_cache_of(layer, params, view, false);
    if (is_ds) {
        cache->form = GPU_ROW_DS_MLA;
        cache->dtype = ATTN_DTYPE_FP8_E4M3;
    } else if (is_v4) {
        cache->form = GPU_ROW_DS_V4;
        cache->dtype = ATTN_DTYPE_FP8_E4M3;
        cache->row_scale = view->scale;
        cache->row_scale_block = view->scale_stride_block;
        cache->row_scale_slot = view->scale_stride_slot;
    }
    return ATTN_OK;
}

/* Latent rows given as one tensor, or as a latent and a rope part. */
static void enter_rows(const struct attn_tensor *joined, const struct attn_tensor *const parts[2],
                       const struct attn_mla_desc *mla, struct gpu_tensor *latent,
                       struct gpu_tensor *rope)
{
    *latent = gpu_tensor_of(joined != NULL ? joined : parts[0]);
    *rope = *latent; /* without a rope part its tensor may be absent */
    if (joined != NULL) {
        rope->data += (int64_t)mla->kv_lora_rank * number_bytes(latent->dtype);
    } else if (mla->qk_rope_head_dim > 0) {
        *rope = gpu_tensor_of(parts[1]);
    }
}

attn_status gpu_attend_mla(const struct attn_attend_args *args, struct attn_error *error)
{
    struct gpu_latent_params p = {0};
    attn_status status = enter_cache(args->layer, args->params, args->k_cache, &p.attend.k, error);
    if (status != ATTN_OK || args->batch->num_reqs == 0) {
        return status;
    }
    const struct attn_mla_desc *mla = mla_of(args->layer);
    const bool sparse = mla->topk > 0;
    const struct attn_index_lists *lists = lists_of(args->layer);
    const struct attn_io_mla *io = ext_of(args->next, ATTN_EXT_IO_MLA);
    const struct attn_tensor *const parts[2] = {io != NULL ? io->q_nope : NULL,
                                                io != NULL ? io->q_pe : NULL};
    struct gpu_tensor latent, rope;
    enter_rows(args->q, parts, mla, &latent, &rope);
    set_problem(&p.attend.problem, args);
    p.attend.q = latent;
    p.q_rope = rope;
    p.attend.out = gpu_tensor_of(args->out);
    p.attend.lse = gpu_lse_of(args->lse);
    set_query_scale(&p.attend, args);
    p.rank = mla->kv_lora_rank;
    p.rope = mla->qk_rope_head_dim;
    const struct schedule_host *plan = args->schedule_host;
    if (sparse) {
        p.topk = io->topk_indices;
        p.topk_stride = io->topk_stride;
        p.num_topk = mla->topk;
        p.entry_keys = 1;
        p.list_heads = args->layer->num_q_heads;
    }
    if (lists != NULL) {
        const struct attn_io_index_lists *given = ext_of(args->next, ATTN_EXT_DRAFT_IO_INDEX_LISTS);
        p.topk = given->indices;
        p.topk_stride = given->token_stride;
        p.list_stride = given->group_stride;
        p.list_lengths = lists->has_lengths ? given->lengths : NULL;
        p.length_stride = given->length_stride;
        p.entry_keys = lists->granularity;
        p.list_heads = lists->groups == ATTN_LISTS_PER_Q_HEAD ? 1 : p.list_heads;
    }
    if (args->prepared->way == GPU_WAY_BOTH_CACHES) {
        const struct attn_layer_cache *of = args->caches;
        const char *tables = (const char *)args->batch->tables;
        struct gpu_cache second;
        status = enter_cache(args->layer, args->params, of->view, &second, error);
        tables += (of->table - 1) * (int64_t)args->batch->table_stride;
        return status != ATTN_OK ? status
                                 : device_status(args->instance->latent->attend_both(
                                                     args, &p, &second, (const void *)tables),
                                                 "attend_mla", error);
    }
    if (sparse && (args->prepared->way != GPU_WAY_LATENT || !plan->fast)) {
        return gpu_run(args->instance, GPU_KERNEL_latent_sparse, 1,
                       (int64_t)args->instance->device.num_sms * 2, &p, args->stream,
                       "attend_mla_sparse", error);
    }
    set_schedule(&p.attend.schedule, args);
    if (plan->fast) {
        return device_status(args->instance->latent->attend(args, &p), "attend_mla", error);
    }
    return gpu_run(args->instance, GPU_KERNEL_latent, 1, p.attend.schedule.ctas, &p, args->stream,
                   "attend_mla", error);
}

static attn_status enter_write(const struct attn_write_kv_args *args,
                               struct gpu_latent_write_params *p, struct attn_error *error)
{
    *p =
        (struct gpu_latent_write_params){.slots = args->slot_mapping, .num_slots = args->num_slots};
    attn_status status = enter_cache(args->layer, args->params, args->k_cache, &p->to, error);
    if (status != ATTN_OK || args->num_slots <= 0) {
        return status;
    }
    const struct attn_mla_desc *mla = mla_of(args->layer);
    const struct attn_io_mla *io = ext_of(args->next, ATTN_EXT_IO_MLA);
    const struct attn_tensor *const parts[2] = {io != NULL ? io->kv_c : NULL,
                                                io != NULL ? io->k_pe : NULL};
    enter_rows(args->k, parts, mla, &p->latent, &p->rope);
    p->rank = mla->kv_lora_rank;
    p->block_size = args->k_cache->block_size;
    return ATTN_OK;
}

attn_status gpu_latent_parts(const struct attn_write_kv_args *args, struct gpu_write_params *p,
                             struct attn_error *error)
{
    struct gpu_latent_write_params l;
    attn_status status = enter_write(args, &l, error);
    *p = (struct gpu_write_params){.from = {l.latent, l.rope},
                                   .to = {l.to, l.to},
                                   .slots = l.slots,
                                   .num_slots = l.num_slots,
                                   .num_heads = 1,
                                   .sides = 2,
                                   .block_size = l.block_size};
    p->to[0].head_size = l.rank;
    p->to[1].head_size -= l.rank;
    p->to[1].data += (int64_t)l.rank * number_bytes(l.to.dtype);
    return status;
}

attn_status gpu_write_latent(const struct attn_write_kv_args *args, struct attn_error *error)
{
    struct gpu_latent_write_params p;
    const attn_status status = enter_write(args, &p, error);
    return status != ATTN_OK ? status
                             : gpu_run(args->instance, GPU_KERNEL_latent_write, p.num_slots,
                                       gpu_warp_groups(&args->instance->device,
                                                       GPU_THREADS_latent_write, p.num_slots, 32),
                                       &p, args->stream, "write_kv", error);
}

attn_status gpu_gather_latent(const struct attn_gather_kv_args *args,
                              const struct gpu_gather_params *gather, struct attn_error *error)
{
    struct gpu_latent_gather_params p = {.gather = *gather};
    attn_status status = enter_cache(args->layer, args->params, args->cache, &p.gather.from, error);
    if (status != ATTN_OK || gather->num_reqs <= 0) {
        return status;
    }
    p.rank = mla_of(args->layer)->kv_lora_rank;
    return gpu_run(args->instance, GPU_KERNEL_latent_gather, 1,
                   (int64_t)args->instance->device.num_sms * 16, &p, args->stream, "gather_kv",
                   error);
}
