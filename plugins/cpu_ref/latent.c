/* SPDX-License-Identifier: Apache-2.0 */
/* Latent rows of MLA: queries and keys that come as one tensor or as two, and what is checked. */
#include <attn/mla.h>

#include "common/number.h"
#include "common/tensors.h"
#include "reference.h"

static const struct attn_mla_desc *mla_of(const struct attn_layer_desc *layer)
{
    return (const struct attn_mla_desc *)ext_of(layer->next, ATTN_EXT_MLA_DESC);
}

bool layer_is_latent(const struct attn_layer_desc *layer)
{
    return layer->kind == ATTN_LAYER_MLA;
}

struct latent_rows latent_queries(const struct attn_attend_args *args)
{
    const struct attn_mla_desc *mla = mla_of(args->layer);
    const struct attn_io_mla *io = (const struct attn_io_mla *)ext_of(args->next, ATTN_EXT_IO_MLA);
    struct latent_rows rows = {
        args->q, NULL, NULL, mla->kv_lora_rank, mla->qk_rope_head_dim, args->layer->num_q_heads};
    if (args->q == NULL && io != NULL) {
        rows.latent = io->q_nope;
        rows.rope = io->q_pe;
    }
    return rows;
}

struct latent_rows latent_keys(const struct attn_write_kv_args *args)
{
    const struct attn_mla_desc *mla = mla_of(args->layer);
    const struct attn_io_mla *io = (const struct attn_io_mla *)ext_of(args->next, ATTN_EXT_IO_MLA);
    struct latent_rows rows = {args->k, NULL, NULL, mla->kv_lora_rank, mla->qk_rope_head_dim, 0};
    if (args->k == NULL && io != NULL) {
        rows.latent = io->kv_c;
        rows.rope = io->k_pe;
    }
    return rows;
}

void latent_load(const struct latent_rows *rows, int64_t token, int64_t head, double *row)
{
    if (rows->joined != NULL) {
        number_load_row(row, tensor_row(rows->joined, token, head),
                        number_dtype_name(rows->joined->dtype), rows->rank + rows->rope_size);
        return;
    }
    /* of [T, size] tensors element (token, 0) begins the row */
    number_load_row(row, tensor_row(rows->latent, token, rows->heads > 0 ? head : 0),
                    number_dtype_name(rows->latent->dtype), rows->rank);
    if (rows->rope_size > 0) {
        number_load_row(row + rows->rank, tensor_row(rows->rope, token, rows->heads > 0 ? head : 0),
                        number_dtype_name(rows->rope->dtype), rows->rope_size);
    }
}

/* A part [T, size] of new keys. */
static attn_status check_flat(const struct attn_tensor *tensor, const char *name, int64_t size,
                              struct attn_error *error)
{
    attn_status status = check_tensor(tensor, name, 2, 0, 0, error);
    if (status == ATTN_OK && (tensor->shape[1] != size || tensor_stride(tensor, 1) != 1)) {
        status = plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, name,
                              "%s is [%lld, %lld] with stride %lld in a row, not [T, %lld] with 1",
                              name, (long long)tensor->shape[0], (long long)tensor->shape[1],
                              (long long)tensor_stride(tensor, 1), (long long)size);
    }
    return status;
}

static attn_status check_part(const struct latent_rows *rows, const struct attn_tensor *tensor,
                              const char *name, int64_t size, int64_t count,
                              struct attn_error *error)
{
    if (size == 0) { /* no rope part: its tensor may be absent */
        return ATTN_OK;
    }
    attn_status status = rows->heads > 0 ? check_tensor(tensor, name, 3, rows->heads, size, error)
                                         : check_flat(tensor, name, size, error);
    return status == ATTN_OK ? check_rows(tensor, name, count, error) : status;
}

/* names: of the joined tensor and of the two parts */
static attn_status check_latent_rows(const struct latent_rows *rows, const char *const names[3],
                                     int64_t count, struct attn_error *error)
{
    int64_t heads = rows->heads > 0 ? rows->heads : 1;
    if (rows->joined != NULL) {
        attn_status status =
            check_tensor(rows->joined, names[0], 3, heads, rows->rank + rows->rope_size, error);
        return status == ATTN_OK ? check_rows(rows->joined, names[0], count, error) : status;
    }
    if (rows->latent == NULL) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, names[0],
                            "%s is NULL and attn_io_mla brings no %s", names[0], names[1]);
    }
    attn_status status = check_part(rows, rows->latent, names[1], rows->rank, count, error);
    return status == ATTN_OK ? check_part(rows, rows->rope, names[2], rows->rope_size, count, error)
                             : status;
}

static attn_status check_layer_mla(const struct attn_layer_desc *layer, struct attn_error *error)
{
    if (layer == NULL || !layer_is_latent(layer) || mla_of(layer) == NULL) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "attn_mla_desc",
                            "the layer is NULL, of kind %d, or has no attn_mla_desc; kind %d with "
                            "one is served",
                            layer != NULL ? layer->kind : -1, ATTN_LAYER_MLA);
    }
    const struct attn_mla_desc *mla = mla_of(layer);
    if (layer->num_q_heads <= 0 || layer->num_kv_heads != 1) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "num_q_heads",
                            "%d query heads over %d KV heads; 1 or more over 1", layer->num_q_heads,
                            layer->num_kv_heads);
    }
    if (mla->kv_lora_rank <= 0 || mla->qk_rope_head_dim < 0 ||
        layer->head_size != mla->kv_lora_rank + mla->qk_rope_head_dim ||
        layer->head_size > REF_MAX_HEAD_SIZE) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "head_size",
                            "%d for a latent of %d and a rope part of %d; their sum, up to %d",
                            layer->head_size, mla->kv_lora_rank, mla->qk_rope_head_dim,
                            REF_MAX_HEAD_SIZE);
    }
    return ATTN_OK;
}

static attn_status check_cache_mla(const struct attn_layer_desc *layer,
                                   const struct attn_layer_params *params,
                                   const struct attn_kv_view *cache, struct attn_error *error)
{
    attn_status status = check_view(cache, "k_cache", 1, layer->head_size, error);
    enum row_form form = row_form(layer, false);
    if (status == ATTN_OK && form != ROW_NUMBERS && form != ROW_DS_MLA) {
        status = plugin_error(error, ATTN_ERROR_UNSUPPORTED, "kv_dtype",
                              "kv_dtype %d; latent rows are f16, bf16, f32, fp8_e4m3, fp8_e5m2 or "
                              "fp8_ds_mla",
                              layer->kv_dtype);
    }
    return status == ATTN_OK ? row_check(layer, params, cache, false, error) : status;
}

static attn_status check_topk(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct attn_io_mla *io = (const struct attn_io_mla *)ext_of(args->next, ATTN_EXT_IO_MLA);
    int32_t topk = mla_of(args->layer)->topk;
    if (io == NULL || io->topk_indices == NULL || topk <= 0 || io->topk_stride < topk) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "topk_indices",
                            "%p, rows %lld apart, of %d; a sparse layer's topk from 1, and rows of "
                            "at least that",
                            io != NULL ? (const void *)io->topk_indices : NULL,
                            io != NULL ? (long long)io->topk_stride : 0, topk);
    }
    return ATTN_OK;
}

static attn_status check_out(const struct attn_attend_args *args, struct attn_error *error)
{
    int64_t rows = args->batch->num_actual_tokens;
    attn_status status = check_tensor(args->out, "out", 3, args->layer->num_q_heads,
                                      mla_of(args->layer)->kv_lora_rank, error);
    if (status == ATTN_OK && number_dtype_name(args->out->dtype) > ATTN_DTYPE_F32) {
        status = plugin_error(error, ATTN_ERROR_UNSUPPORTED, "out",
                              "out has dtype code %d of %d bits; attend_mla writes f16, bf16 and "
                              "f32",
                              args->out->dtype.code, args->out->dtype.bits);
    }
    status = status == ATTN_OK ? check_rows(args->out, "out", rows, error) : status;
    return status == ATTN_OK && args->lse != NULL ? check_lse(args->lse, "lse", error) : status;
}

attn_status check_attend_mla(const struct attn_attend_args *args, bool sparse,
                             struct attn_error *error)
{
    static const char *const names[] = {"q", "q_nope", "q_pe"};
    attn_status status = check_instance(args->instance, error);
    status = status == ATTN_OK ? check_layer_mla(args->layer, error) : status;
    if (status != ATTN_OK) {
        return status;
    }
    const struct attn_batch *batch = args->batch;
    if (batch == NULL || batch->query_start_loc == NULL) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "batch",
                            "attend_mla needs a batch with query_start_loc");
    }
    if (args->params == NULL || args->layer->sink_len > 0) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT,
                            args->params == NULL ? "params" : "sink_len",
                            "params %p, sink_len %d; params are needed, and 0 static sink keys",
                            (const void *)args->params, args->layer->sink_len);
    }
    status = check_params(args, error);
    status = status == ATTN_OK ? check_terms(args, error) : status;
    if (status == ATTN_OK && (batch->seq_lens == NULL || batch->block_table == NULL)) {
        status = plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "block_table",
                              "attend_mla needs seq_lens and block_table");
    }
    if (status == ATTN_OK) {
        struct latent_rows queries = latent_queries(args);
        status = check_latent_rows(&queries, names, batch->num_actual_tokens, error);
    }
    status = status == ATTN_OK ? check_out(args, error) : status;
    if (status == ATTN_OK) {
        status = check_cache_mla(args->layer, args->params, args->k_cache, error);
    }
    return status == ATTN_OK && sparse ? check_topk(args, error) : status;
}

attn_status check_write_latent(const struct attn_write_kv_args *args, struct attn_error *error)
{
    static const char *const names[] = {"k", "kv_c", "k_pe"};
    attn_status status = check_instance(args->instance, error);
    status = status == ATTN_OK ? check_layer_mla(args->layer, error) : status;
    if (status == ATTN_OK && (args->params == NULL || args->slot_mapping == NULL)) {
        status = plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "slot_mapping",
                              "write_kv needs params and slot_mapping");
    }
    if (status == ATTN_OK) {
        struct latent_rows keys = latent_keys(args);
        status = check_latent_rows(&keys, names, args->num_slots, error);
    }
    return status == ATTN_OK ? check_cache_mla(args->layer, args->params, args->k_cache, error)
                             : status;
}
