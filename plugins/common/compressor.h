/* SPDX-License-Identifier: Apache-2.0 */
/* Compressors in double precision: the states of a step's tokens are written, and the rows that
 * they finish pooled of these and earlier ones. */
#ifndef PLUGINS_COMMON_COMPRESSOR_H
#define PLUGINS_COMMON_COMPRESSOR_H

#include <attn/draft/compressor.h>
#include <attn/plugin.h>

#include "common/entry.h"
#include "common/rope.h"

enum { COMPRESSOR_MAX_SIZE = 512 };

struct compressor_loop {
    const struct attn_attend_args *args;
    const struct attn_compressor_desc *desc;
    const struct attn_io_compressor *io;
    int64_t first_row;
};

static inline float *compressor_state(const struct attn_kv_view *view, int64_t block,
                                      int64_t offset, int64_t head)
{
    return (float *)((uint8_t *)view->data + block * view->stride_block +
                     offset * view->stride_slot + head * view->stride_head);
}

static inline void compressor_write_states(void *argument, int64_t begin, int64_t end,
                                           int32_t worker)
{
    const struct attn_write_kv_args *args = argument;
    const struct attn_kv_view *view = args->k_cache;
    double row[COMPRESSOR_MAX_SIZE];
    for (int64_t t = begin; t < end; t++) {
        const int64_t slot = args->slot_mapping[t];
        for (int32_t h = 0; h < view->num_heads && slot >= 0; h++) {
            number_load_row(row, tensor_row(args->k, t, h), number_dtype_name(args->k->dtype),
                            view->head_size);
            number_store_row(
                compressor_state(view, slot / view->block_size, slot % view->block_size, h), row,
                ATTN_DTYPE_F32, view->head_size);
        }
    }
}

static inline attn_status compressor_write(const struct attn_write_kv_args *args,
                                           const struct attn_host *host)
{
    host->parallel_for(host->user, args->num_slots, 8, compressor_write_states,
                       (void *)(uintptr_t)args);
    return ATTN_OK;
}

/* One token's part of a row that is pooled: its values and its gates with their bias. */
static inline void compressor_token(const struct compressor_loop *loop, const int32_t *table,
                                    int64_t position, bool own, const float **values, double *gates)
{
    const struct attn_kv_view *view = loop->args->k_cache;
    const int32_t size = view->head_size, parts = 1 + loop->desc->overlaps;
    const int32_t part = own ? parts - 1 : 0;
    const struct attn_tensor *bias = loop->io->position_bias;
    const int64_t block = table[position / view->block_size], offset = position % view->block_size;
    const float *stored = compressor_state(view, block, offset, parts + part);
    double added[COMPRESSOR_MAX_SIZE] = {0};
    *values = compressor_state(view, block, offset, part);
    if (bias != NULL) {
        const uint8_t *row = tensor_row(bias, position % loop->desc->tokens_per_row, 0);
        number_load_row(added, row + (size_t)part * (size_t)size * (size_t)(bias->dtype.bits / 8),
                        number_dtype_name(bias->dtype), size);
    }
    for (int32_t d = 0; d < size; d++) {
        gates[d] = stored[d] + added[d];
    }
}

/* Each channel by a softmax of its own, over the tokens of the row that ends at `position`. */
static inline void compressor_pool(const struct compressor_loop *loop, const int32_t *table,
                                   int64_t position, double *row)
{
    const int32_t size = loop->args->k_cache->head_size, ratio = loop->desc->tokens_per_row;
    const int64_t own = position + 1 - ratio, before = loop->desc->overlaps ? own - ratio : own;
    double gates[COMPRESSOR_MAX_SIZE], row_max[COMPRESSOR_MAX_SIZE], row_sum[COMPRESSOR_MAX_SIZE];
    const float *values;
    for (int32_t d = 0; d < size; d++) {
        row_max[d] = -INFINITY;
        row[d] = row_sum[d] = 0;
    }
    for (int64_t p = before > 0 ? before : 0; p <= position; p++) {
        compressor_token(loop, table, p, p >= own, &values, gates);
        for (int32_t d = 0; d < size; d++) {
            row_max[d] = fmax(row_max[d], gates[d]);
        }
    }
    for (int64_t p = before > 0 ? before : 0; p <= position; p++) {
        compressor_token(loop, table, p, p >= own, &values, gates);
        for (int32_t d = 0; d < size; d++) {
            const double weight = exp(gates[d] - row_max[d]);
            row_sum[d] += weight;
            row[d] += weight * values[d];
        }
    }
    for (int32_t d = 0; d < size; d++) {
        row[d] /= row_sum[d];
    }
}

/* Items are tokens. */
static inline void compressor_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct compressor_loop *loop = argument;
    const struct attn_attend_args *args = loop->args;
    const struct attn_batch *batch = args->batch;
    const int32_t size = args->k_cache->head_size, rotary = loop->desc->rotary_dim;
    double row[COMPRESSOR_MAX_SIZE];
    int32_t r = 0;
    for (int64_t t = begin + loop->first_row; t < end + loop->first_row; t++) {
        while (t >= batch->query_start_loc[r + 1]) {
            r++;
        }
        const int64_t position = batch->seq_lens[r] - (batch->query_start_loc[r + 1] - t);
        const int64_t table_row = batch->block_table_row != NULL ? batch->block_table_row[r] : r;
        if (position < 0 || (position + 1) % loop->desc->tokens_per_row != 0) {
            continue;
        }
        compressor_pool(loop, batch->block_table + table_row * batch->block_table_stride, position,
                        row);
        rope_norm_row(loop->io->norm_weight, (double)loop->io->norm_eps, row, size);
        if (loop->desc->rope != ATTN_ROPE_NONE) {
            rope_rotate_row(loop->desc->rope, loop->io->cos_sin,
                            position + 1 - loop->desc->tokens_per_row, row + size - rotary, rotary);
        }
        number_store_row(tensor_row(args->out, t, 0), row, number_dtype_name(args->out->dtype),
                         size);
    }
}

static inline attn_status compressor_attend(const struct attn_attend_args *args,
                                            const struct attn_host *host)
{
    const struct attn_batch *batch = args->batch;
    struct compressor_loop loop = {args, ext_of(args->layer->next, ATTN_EXT_DRAFT_COMPRESSOR_DESC),
                                   ext_of(args->next, ATTN_EXT_DRAFT_IO_COMPRESSOR),
                                   batch->query_start_loc[0]};
    int64_t end = batch->query_start_loc[batch->num_reqs];
    end = end < batch->num_actual_tokens ? end : batch->num_actual_tokens;
    if (end > loop.first_row) {
        host->parallel_for(host->user, end - loop.first_row, 1, compressor_items, &loop);
    }
    return ATTN_OK;
}

#endif
