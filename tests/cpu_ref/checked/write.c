/* SPDX-License-Identifier: Apache-2.0 */
/* write_kv: the bytes of every row that it wrote. */
#include <attn/mla.h>

#include "checked.h"

static attn_status verify_latent(const struct attn_write_kv_args *args, int64_t token,
                                 const struct cache_row *row, struct attn_error *error)
{
    const struct attn_mla_desc *mla = extension(args->layer->next, ATTN_EXT_MLA_DESC);
    const struct attn_io_mla *io = extension(args->next, ATTN_EXT_IO_MLA);
    double *given = checked_memory(row->view->head_size);
    if (args->k != NULL) {
        tensor_load(args->k, token, 0, 0, row->view->head_size, given);
    } else {
        tensor_load(io->kv_c, token, 0, 0, mla->kv_lora_rank, given);
        tensor_load(io->k_pe, token, 0, 0, mla->qk_rope_head_dim, given + mla->kv_lora_rank);
    }
    return row_hold(row, token, given, error);
}

static attn_status verify_token(const struct attn_write_kv_args *args, int64_t token,
                                struct attn_error *error)
{
    bool latent = args->layer->kind == ATTN_LAYER_MLA;
    attn_status status = ATTN_OK;
    for (int32_t i = 0; i < (latent ? 1 : 2 * args->layer->num_kv_heads); i++) {
        const struct attn_tensor *given = i % 2 ? args->v : args->k;
        struct cache_row row = {.layer = args->layer,
                                .params = args->params,
                                .view = i % 2 ? args->v_cache : args->k_cache,
                                .value = i % 2,
                                .head = i / 2};
        row.block = args->slot_mapping[token] / row.view->block_size;
        row.slot = args->slot_mapping[token] % row.view->block_size;
        checked_clear();
        if (latent) {
            return verify_latent(args, token, &row, error);
        }
        double *x = checked_memory(row.view->head_size);
        tensor_load(given, token, row.head, 0, row.view->head_size, x);
        status = status == ATTN_OK ? row_hold(&row, token, x, error) : status;
    }
    return status;
}

attn_status checked_written(const struct attn_write_kv_args *args, struct attn_error *error)
{
    attn_status status = ATTN_OK;
    checked_begin();
    for (int64_t t = 0; t < args->num_slots && status == ATTN_OK; t++) {
        status = args->slot_mapping[t] >= 0 ? verify_token(args, t, error) : ATTN_OK;
    }
    checked_end();
    return status;
}

attn_status checked_write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    attn_status status = cpu_ref_kernels->write_kv(args, error);
    return status == ATTN_OK && attends(args->layer) ? checked_written(args, error) : status;
}
