/* SPDX-License-Identifier: Apache-2.0 */
/* Latent rows of MLA: queries and keys that come as one tensor or as two. */
#include <attn/mla.h>

#include "common/number.h"
#include "common/tensors.h"
#include "reference.h"

struct latent_rows latent_queries(const struct attn_attend_args *args)
{
    const struct attn_mla_desc *mla = mla_of(args->layer);
    const struct attn_io_mla *io = ext_of(args->next, ATTN_EXT_IO_MLA);
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
    const struct attn_io_mla *io = ext_of(args->next, ATTN_EXT_IO_MLA);
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
    /* in tensors [T, size] element (token, 0) begins the row */
    number_load_row(row, tensor_row(rows->latent, token, rows->heads > 0 ? head : 0),
                    number_dtype_name(rows->latent->dtype), rows->rank);
    if (rows->rope_size > 0) {
        number_load_row(row + rows->rank, tensor_row(rows->rope, token, rows->heads > 0 ? head : 0),
                        number_dtype_name(rows->rope->dtype), rows->rope_size);
    }
}
