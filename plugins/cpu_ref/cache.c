/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of a KV cache through their strided view, and the kernels that move them. */
#include <attn/indexer.h>
#include <string.h>

#include "common/index_write.h"
#include "common/number.h"
#include "common/tensors.h"
#include "reference.h"

/* In caches of plain numbers: what an element is, and the scale of its head. */
static int32_t number_of_place(const struct cache_place *at)
{
    return at->layer->kv_dtype == ATTN_KV_INT8_K ? at->layer->dtype
           : at->layer->kv_dtype == ATTN_KV_TURBOQUANT_K8V4
               ? ATTN_DTYPE_FP8_E4M3
               : number_of_kv(layer_kv_dtype(at->layer, at->is_v));
}

static double scale_of_place(const struct cache_place *at)
{
    const struct attn_layer_params *p = at->params;
    if (at->layer->kv_dtype == ATTN_KV_INT8_K || at->layer->kv_dtype == ATTN_KV_TURBOQUANT_K8V4) {
        return 1;
    }
    return at->is_v ? scale_of_head(p->v_scale, p->v_scale_host, at->layer->v_scale_form, at->head)
                    : scale_of_head(p->k_scale, p->k_scale_host, at->layer->k_scale_form, at->head);
}

void cache_load(const struct cache_place *at, double *row)
{
    const struct attn_kv_view *view = at->view;
    if (row_form(at->layer, at->is_v) != ROW_NUMBERS) {
        row_load(at, row);
        return;
    }
    const uint8_t *memory = view_row(view, at->block, at->slot, at->head);
    int32_t number = number_of_place(at);
    int32_t pack = view->pack > 0 ? view->pack : view->head_size;
    double scale = scale_of_place(at);
    for (int32_t d = 0; d < view->head_size; d += pack) {
        number_load_row(row + d, memory + d / pack * view->stride_pack, number, pack);
    }
    for (int32_t d = 0; d < view->head_size; d++) {
        row[d] *= scale;
    }
}

static void cache_store(const struct cache_place *at, const double *row)
{
    const struct attn_kv_view *view = at->view;
    if (row_form(at->layer, at->is_v) != ROW_NUMBERS) {
        row_store(at, row);
        return;
    }
    uint8_t *memory = view_row(view, at->block, at->slot, at->head);
    int32_t number = number_of_place(at);
    int32_t pack = view->pack > 0 ? view->pack : view->head_size;
    double scaled[REF_MAX_HEAD_SIZE], scale = scale_of_place(at);
    for (int32_t d = 0; d < view->head_size; d++) {
        scaled[d] = row[d] / scale;
    }
    for (int32_t d = 0; d < view->head_size; d += pack) {
        number_store_row(memory + d / pack * view->stride_pack, scaled + d, number, pack);
    }
}

/* Writes a row of a tensor; one of the cache's dtype keeps its bits, NaNs included. */
static void store_tensor_row(const struct cache_place *at, const struct attn_tensor *from,
                             int64_t t)
{
    const struct attn_kv_view *view = at->view;
    const uint8_t *source = tensor_row(from, t, at->head);
    const int32_t dtype = number_dtype_name(from->dtype);
    double row[REF_MAX_HEAD_SIZE];
    if (row_form(at->layer, at->is_v) != ROW_NUMBERS || number_of_place(at) != dtype) {
        number_load_row(row, source, dtype, view->head_size);
        cache_store(at, row);
        return;
    }
    uint8_t *memory = view_row(view, at->block, at->slot, at->head);
    const int32_t pack = view->pack > 0 ? view->pack : view->head_size;
    const size_t bytes = (size_t)pack * (from->dtype.bits / 8);
    for (int32_t d = 0; d < view->head_size; d += pack, source += bytes) {
        memcpy(memory + d / pack * view->stride_pack, source, bytes);
    }
}

struct write_loop {
    const struct attn_write_kv_args *args;
};

/* MLA: one row of one head, from one tensor or two. */
static void write_latent_rows(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct attn_write_kv_args *args = ((const struct write_loop *)argument)->args;
    const struct latent_rows keys = latent_keys(args);
    double row[REF_MAX_HEAD_SIZE];
    for (int64_t t = begin; t < end; t++) {
        int64_t slot = args->slot_mapping[t];
        if (slot >= 0) {
            struct cache_place at = {args->layer,
                                     args->params,
                                     args->k_cache,
                                     false,
                                     slot / args->k_cache->block_size,
                                     slot % args->k_cache->block_size,
                                     0};
            latent_load(&keys, t, 0, row);
            cache_store(&at, row);
        }
    }
}

/* An indexer's rows, each from the key of its last token. */
static void write_index_rows(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct attn_write_kv_args *args = ((const struct write_loop *)argument)->args;
    const struct attn_kv_view *view = args->k_cache;
    const struct attn_indexer_desc *desc = ext_of(args->layer->next, ATTN_EXT_INDEXER_DESC);
    const struct attn_index_write *write = ext_of(args->layer->next, ATTN_EXT_DRAFT_INDEX_WRITE);
    const int32_t tokens = desc->tokens_per_row;
    double row[REF_MAX_HEAD_SIZE];
    for (int64_t t = begin; t < end; t++) {
        const int64_t slot = args->slot_mapping[t];
        if (slot >= 0 && slot % tokens == tokens - 1) {
            const int64_t at = slot / tokens;
            const struct cache_place place = {
                args->layer,           args->params,          view, false,
                at / view->block_size, at % view->block_size, 0};
            index_write_load(args, write, t, row);
            cache_store(&place, row);
        }
    }
}

static void write_rows(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct attn_write_kv_args *args = ((const struct write_loop *)argument)->args;
    const struct attn_layer_desc *layer = args->layer;
    const struct attn_layer_params *params = args->params;
    for (int64_t t = begin; t < end; t++) {
        int64_t slot = args->slot_mapping[t];
        if (slot < 0) {
            continue;
        }
        int64_t block = slot / args->k_cache->block_size;
        int64_t offset = slot % args->k_cache->block_size;
        for (int64_t h = 0; h < layer->num_kv_heads; h++) {
            struct cache_place k = {layer, params, args->k_cache, false, block, offset, h};
            struct cache_place v = {layer, params, args->v_cache, true, block, offset, h};
            store_tensor_row(&k, args->k, t);
            store_tensor_row(&v, args->v, t);
        }
    }
}

attn_status ref_write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    const struct attn_host *host = args->instance->host;
    struct write_loop loop = {args};
    host->parallel_for(host->user, args->num_slots, 8,
                       args->layer->kind == ATTN_LAYER_INDEXER ? write_index_rows
                       : layer_is_latent(args->layer)          ? write_latent_rows
                                                               : write_rows,
                       &loop);
    return ATTN_OK;
}

/* Items are requests: each has rows out_start_loc[r] .. [r + 1] - 1 of its own. */
static void gather_requests(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct attn_gather_kv_args *args = argument;
    const struct attn_batch *batch = args->batch;
    const struct attn_kv_view *cache = args->cache;
    double row[REF_MAX_HEAD_SIZE];
    for (int64_t r = begin; r < end; r++) {
        int64_t table_row = batch->block_table_row != NULL ? batch->block_table_row[r] : r;
        const int32_t *table = batch->block_table + table_row * batch->block_table_stride;
        int64_t first = args->first_key != NULL ? args->first_key[r] : 0;
        for (int64_t i = args->out_start_loc[r]; i < args->out_start_loc[r + 1]; i++) {
            int64_t j = first + i - args->out_start_loc[r];
            for (int64_t h = 0; h < cache->num_heads; h++) {
                struct cache_place at = {args->layer,
                                         args->params,
                                         cache,
                                         false,
                                         table[j / cache->block_size],
                                         j % cache->block_size,
                                         h};
                cache_load(&at, row);
                number_store_row(tensor_row(args->out, i, h), row,
                                 number_dtype_name(args->out->dtype), cache->head_size);
            }
        }
    }
}

attn_status ref_gather_kv(const struct attn_gather_kv_args *args, struct attn_error *error)
{
    const struct attn_host *host = args->instance->host;
    host->parallel_for(host->user, args->batch->num_reqs, 1, gather_requests,
                       (void *)(uintptr_t)args);
    return ATTN_OK;
}

attn_status ref_copy_blocks(const struct attn_copy_blocks_args *args, struct attn_error *error)
{
    for (int32_t c = 0; c < args->num_copies; c++) {
        const struct attn_block_copy *copy =
            (const void *)((const char *)args->copies + (int64_t)c * args->copy_stride);
        for (int64_t i = 0; i < args->num_pairs; i++) {
            int64_t from = args->pairs[2 * i], to = args->pairs[2 * i + 1];
            memmove((uint8_t *)copy->destination + to * copy->destination_stride,
                    (const uint8_t *)copy->source + from * copy->source_stride,
                    (size_t)copy->bytes);
        }
    }
    return ATTN_OK;
}

attn_status ref_copy(const struct attn_copy_args *args, struct attn_error *error)
{
    memmove(args->destination, args->source, args->bytes);
    return ATTN_OK;
}

attn_status ref_fill(const struct attn_fill_args *args, struct attn_error *error)
{
    for (int64_t i = 0; i < args->rows; i++) {
        memset((uint8_t *)args->destination + (size_t)i * args->stride, args->value,
               args->row_bytes);
    }
    return ATTN_OK;
}
