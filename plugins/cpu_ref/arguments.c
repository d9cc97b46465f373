/* SPDX-License-Identifier: Apache-2.0 */
/* What the reference checks before it reads: vendors' tools call it directly. */
#include "common/number.h"
#include "common/tensors.h"
#include "reference.h"

attn_status check_tensor(const struct attn_tensor *tensor, const char *name, int32_t ndim,
                         int64_t heads, int64_t head_size, struct attn_error *error)
{
    if (tensor == NULL || tensor->data == NULL || tensor->shape == NULL) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, name, "%s is NULL", name);
    }
    if (tensor->ndim != ndim) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, name,
                            "%s has %d dimensions, not %d", name, tensor->ndim, ndim);
    }
    if (number_dtype_name(tensor->dtype) < 0) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, name,
                            "%s has dtype code %d of %d bits, which is none of f16, bf16, f32, "
                            "fp8 and int8",
                            name, tensor->dtype.code, tensor->dtype.bits);
    }
    if (ndim == 3 && (tensor->shape[1] != heads || tensor->shape[2] != head_size)) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, name,
                            "%s is [%lld, %lld, %lld], not [T, %lld, %lld]", name,
                            (long long)tensor->shape[0], (long long)tensor->shape[1],
                            (long long)tensor->shape[2], (long long)heads, (long long)head_size);
    }
    if (ndim == 3 && tensor_stride(tensor, 2) != 1) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, name,
                            "the last dimension of %s has stride %lld, not 1", name,
                            (long long)tensor_stride(tensor, 2));
    }
    return ATTN_OK;
}

attn_status check_lse(const struct attn_tensor *lse, const char *name, struct attn_error *error)
{
    attn_status status = check_tensor(lse, name, 2, 0, 0, error);
    if (status == ATTN_OK && number_dtype_name(lse->dtype) != ATTN_DTYPE_F32) {
        status = plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, name,
                              "%s has dtype code %d of %d bits; float32 only", name,
                              lse->dtype.code, lse->dtype.bits);
    }
    return status;
}

attn_status check_rows(const struct attn_tensor *tensor, const char *name, int64_t rows,
                       struct attn_error *error)
{
    if (tensor->shape[0] < rows) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, name,
                            "%s has %lld rows; at least %lld are needed", name,
                            (long long)tensor->shape[0], (long long)rows);
    }
    return ATTN_OK;
}

attn_status check_instance(const attn_instance *instance, struct attn_error *error)
{
    return instance != NULL ? ATTN_OK
                            : plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "instance",
                                           "is NULL; create makes one");
}

static attn_status check_layer(const struct attn_layer_desc *layer, struct attn_error *error)
{
    if (layer == NULL || layer->num_kv_heads <= 0 || layer->num_q_heads <= 0 ||
        layer->num_q_heads % layer->num_kv_heads != 0) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "num_q_heads",
                            "%d query heads over %d KV heads; must be a positive multiple",
                            layer != NULL ? layer->num_q_heads : 0,
                            layer != NULL ? layer->num_kv_heads : 0);
    }
    if (layer->head_size <= 0 || layer->head_size > REF_MAX_HEAD_SIZE || layer->head_size_v <= 0 ||
        layer->head_size_v > REF_MAX_HEAD_SIZE) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "head_size",
                            "head sizes %d and %d; 1 to %d", layer->head_size, layer->head_size_v,
                            REF_MAX_HEAD_SIZE);
    }
    return ATTN_OK;
}

attn_status check_view(const struct attn_kv_view *view, const char *name, int32_t heads,
                       int32_t head_size, struct attn_error *error)
{
    if (view == NULL || view->data == NULL || view->block_size <= 0) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, name,
                            "%s is NULL or has no block size", name);
    }
    if (view->num_heads != heads || view->head_size != head_size) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, name,
                            "%s has %d heads of %d, not %d of %d", name, view->num_heads,
                            view->head_size, heads, head_size);
    }
    if (view->pack < 0 || (view->pack > 0 && head_size % view->pack != 0)) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, name,
                            "%s packs %d dims; 0 or a divisor of head size %d", name, view->pack,
                            head_size);
    }
    return ATTN_OK;
}

attn_status check_params(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct attn_layer_desc *layer = args->layer;
    if (args->params == NULL) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "params", "is NULL");
    }
    if (layer->has_sinks && args->params->sinks == NULL) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "sinks",
                            "the layer has sinks and the parameters have none");
    }
    if (layer->alibi != ATTN_ALIBI_NONE && args->params->alibi_slopes == NULL) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "alibi_slopes",
                            "the layer has ALiBi and the parameters have no slopes");
    }
    if (layer->sink_len > 0) {
        attn_status status = check_tensor(args->params->sink_k, "sink_k", 3, layer->num_kv_heads,
                                          layer->head_size, error);
        return status != ATTN_OK ? status
                                 : check_tensor(args->params->sink_v, "sink_v", 3,
                                                layer->num_kv_heads, layer->head_size_v, error);
    }
    return ATTN_OK;
}

static attn_status check_keys(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct attn_layer_desc *layer = args->layer;
    attn_status status;
    if (args->k_cache == NULL) {
        status = check_tensor(args->k, "k", 3, layer->num_kv_heads, layer->head_size, error);
        return status != ATTN_OK
                   ? status
                   : check_tensor(args->v, "v", 3, layer->num_kv_heads, layer->head_size_v, error);
    }
    status = check_view(args->k_cache, "k_cache", layer->num_kv_heads, layer->head_size, error);
    if (status == ATTN_OK) {
        status =
            check_view(args->v_cache, "v_cache", layer->num_kv_heads, layer->head_size_v, error);
    }
    if (status == ATTN_OK && (args->batch->seq_lens == NULL || args->batch->block_table == NULL)) {
        status = plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "block_table",
                              "a paged attend needs seq_lens and block_table");
    }
    if (status == ATTN_OK) {
        status = row_check(layer, args->params, args->k_cache, false, error);
    }
    if (status == ATTN_OK) {
        status = row_check(layer, args->params, args->v_cache, true, error);
    }
    return status;
}

/* What the batch carries beside its lengths. */
attn_status check_terms(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct attn_batch *batch = args->batch;
    if (batch->spans != NULL && batch->span_start_loc == NULL) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "span_start_loc",
                            "is NULL; spans need it");
    }
    if (batch->num_reqs < 0 || batch->num_actual_tokens < 0) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "num_reqs",
                            "%d requests of %d tokens; both from 0", batch->num_reqs,
                            batch->num_actual_tokens);
    }
    return ATTN_OK;
}

static attn_status check_flags(const struct attn_attend_args *args, struct attn_error *error)
{
    bool writes = args->k_cache != NULL && !(args->flags & ATTN_RUN_NO_WRITE);
    bool decode = args->phase == ATTN_PHASE_DECODE;
    if (!writes || (decode && REF_DECODE_WRITES >> args->layer->kv_dtype & 1)) {
        return ATTN_OK;
    }
    return plugin_error(error, ATTN_ERROR_UNSUPPORTED, "flags",
                        "%u without NO_WRITE in phase %d, kv_dtype %d; attend writes keys in "
                        "decodes (phase %d) of int8_kv and int8_k (%d, %d)",
                        args->flags, args->phase, args->layer->kv_dtype, ATTN_PHASE_DECODE,
                        ATTN_KV_INT8_KV, ATTN_KV_INT8_K);
}

attn_status check_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    attn_status status = check_instance(args->instance, error);
    if (status == ATTN_OK) {
        status = check_layer(args->layer, error);
    }
    if (status == ATTN_OK && (args->batch == NULL || args->batch->query_start_loc == NULL)) {
        status = plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "batch",
                              "attend needs a batch with query_start_loc");
    }
    if (status == ATTN_OK) {
        status = check_terms(args, error);
    }
    if (status == ATTN_OK) {
        status = check_params(args, error);
    }
    if (status == ATTN_OK) {
        status =
            check_tensor(args->q, "q", 3, args->layer->num_q_heads, args->layer->head_size, error);
    }
    if (status == ATTN_OK) {
        status = check_tensor(args->out, "out", 3, args->layer->num_q_heads,
                              args->layer->head_size_v, error);
    }
    if (status == ATTN_OK && number_dtype_name(args->out->dtype) > ATTN_DTYPE_F32) {
        status = plugin_error(error, ATTN_ERROR_UNSUPPORTED, "out",
                              "out has dtype code %d of %d bits; attend writes f16, bf16 and f32",
                              args->out->dtype.code, args->out->dtype.bits);
    }
    if (status == ATTN_OK) {
        int64_t rows = args->batch->num_actual_tokens;
        status = check_rows(args->q, "q", rows, error);
        status = status != ATTN_OK ? status : check_rows(args->out, "out", rows, error);
    }
    if (status == ATTN_OK && args->lse != NULL) {
        status = check_lse(args->lse, "lse", error);
    }
    status = status == ATTN_OK ? check_keys(args, error) : status;
    return status == ATTN_OK ? check_flags(args, error) : status;
}

attn_status check_write(const struct attn_write_kv_args *args, struct attn_error *error)
{
    attn_status status = ATTN_OK;
    if (status == ATTN_OK && args->layer != NULL && layer_is_latent(args->layer)) {
        return check_write_latent(args, error);
    }
    status = status ? status : check_instance(args->instance, error);
    if (status == ATTN_OK) {
        status = check_layer(args->layer, error);
    }
    if (status == ATTN_OK && (args->params == NULL || args->slot_mapping == NULL)) {
        status = plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "slot_mapping",
                              "write_kv needs params and slot_mapping");
    }
    if (status == ATTN_OK) {
        status = check_view(args->k_cache, "k_cache", args->layer->num_kv_heads,
                            args->layer->head_size, error);
    }
    if (status == ATTN_OK) {
        status = check_view(args->v_cache, "v_cache", args->layer->num_kv_heads,
                            args->layer->head_size_v, error);
    }
    if (status == ATTN_OK) {
        status =
            check_tensor(args->k, "k", 3, args->layer->num_kv_heads, args->layer->head_size, error);
    }
    if (status == ATTN_OK) {
        status = check_tensor(args->v, "v", 3, args->layer->num_kv_heads, args->layer->head_size_v,
                              error);
    }
    if (status == ATTN_OK) {
        status = check_rows(args->k, "k", args->num_slots, error);
        status = status != ATTN_OK ? status : check_rows(args->v, "v", args->num_slots, error);
    }
    if (status == ATTN_OK) {
        status = row_check(args->layer, args->params, args->k_cache, false, error);
    }
    if (status == ATTN_OK) {
        status = row_check(args->layer, args->params, args->v_cache, true, error);
    }
    return status;
}
