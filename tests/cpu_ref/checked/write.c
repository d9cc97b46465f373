/* SPDX-License-Identifier: Apache-2.0 */
/* write_kv: the bytes of every row that it wrote into plain, fp8 and latent caches. */
#include <attn/mla.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "checked.h"
#include "support/number.h"

/* What `size` bytes of a cache hold, NaN being NaN whatever its bits. */
static attn_status hold_bytes(const uint8_t *found, const void *wanted, int32_t number, int64_t row,
                              int64_t head, int64_t dim, struct attn_error *error)
{
    double is = number_load(found, 0, number), should = number_load(wanted, 0, number);
    bool same = isnan(should) ? isnan(is) : memcmp(found, wanted, number_bytes(number)) == 0;
    return same ? ATTN_OK : checked_wrong(error, "cache", row, head, dim, is, should);
}

static attn_status hold_row(const struct attn_write_kv_args *args, bool value, int64_t row,
                            int32_t head, const double *given, struct attn_error *error)
{
    const struct attn_kv_view *view = value ? args->v_cache : args->k_cache;
    const struct attn_layer_params *p = args->params;
    const struct attn_layer_desc *layer = args->layer;
    int64_t slot = args->slot_mapping[row];
    int32_t number = cache_number(layer);
    double scale = value ? head_scale(p->v_scale, p->v_scale_host, layer->v_scale_form, head)
                         : head_scale(p->k_scale, p->k_scale_host, layer->k_scale_form, head);
    attn_status status = ATTN_OK;
    for (int32_t d = 0; d < view->head_size && status == ATTN_OK; d++) {
        uint8_t wanted[8];
        number_store(wanted, 0, number, given[d] / scale);
        status = hold_bytes(
            view_element(view, slot / view->block_size, slot % view->block_size, head, d, number),
            wanted, number, row, head, d, error);
    }
    return status;
}

/* 512 e4m3 in tiles of 128, whose scales make each tile's largest 448, and 64 bf16. */
static attn_status hold_ds_mla(const struct attn_write_kv_args *args, int64_t row,
                               const double *given, struct attn_error *error)
{
    const struct attn_kv_view *view = args->k_cache;
    int64_t slot = args->slot_mapping[row];
    const uint8_t *found =
        view_element(view, slot / view->block_size, slot % view->block_size, 0, 0, ATTN_DTYPE_INT8);
    uint8_t wanted[8];
    attn_status status = ATTN_OK;
    for (int32_t d = 0; d < 576 && status == ATTN_OK; d++) {
        if (d >= 512) {
            number_store(wanted, 0, ATTN_DTYPE_BF16, given[d]);
            status =
                hold_bytes(found + 528 + 2 * (d - 512), wanted, ATTN_DTYPE_BF16, row, 0, d, error);
            continue;
        }
        double largest = 0;
        for (int32_t i = d / 128 * 128; i < d / 128 * 128 + 128; i++) {
            largest = fmax(largest, fabs(given[i]));
        }
        float scale = (float)fmax(largest / 448, FLT_MIN);
        status = hold_bytes(found + 512 + d / 128 * 4, &scale, ATTN_DTYPE_F32, row, 0, d, error);
        number_store(wanted, 0, ATTN_DTYPE_FP8_E4M3, given[d] / scale);
        if (status == ATTN_OK) {
            status = hold_bytes(found + d, wanted, ATTN_DTYPE_FP8_E4M3, row, 0, d, error);
        }
    }
    return status;
}

static attn_status hold_latent(const struct attn_write_kv_args *args, int64_t row,
                               struct attn_error *error)
{
    const struct attn_mla_desc *mla =
        (const struct attn_mla_desc *)extension(args->layer->next, ATTN_EXT_MLA_DESC);
    const struct attn_io_mla *io =
        (const struct attn_io_mla *)extension(args->next, ATTN_EXT_IO_MLA);
    double *given = checked_memory(args->k_cache->head_size);
    if (args->k != NULL) {
        tensor_load(args->k, row, 0, 0, args->k_cache->head_size, given);
    } else {
        tensor_load(io->kv_c, row, 0, 0, mla->kv_lora_rank, given);
        tensor_load(io->k_pe, row, 0, 0, mla->qk_rope_head_dim, given + mla->kv_lora_rank);
    }
    return args->layer->kv_dtype == ATTN_KV_FP8_DS_MLA
               ? hold_ds_mla(args, row, given, error)
               : hold_row(args, false, row, 0, given, error);
}

static attn_status hold_heads(const struct attn_write_kv_args *args, int64_t row,
                              struct attn_error *error)
{
    attn_status status = ATTN_OK;
    for (int32_t h = 0; h < args->layer->num_kv_heads; h++) {
        double *k = checked_memory(args->k_cache->head_size);
        double *v = checked_memory(args->v_cache->head_size);
        tensor_load(args->k, row, h, 0, args->k_cache->head_size, k);
        tensor_load(args->v, row, h, 0, args->v_cache->head_size, v);
        status = status == ATTN_OK ? hold_row(args, false, row, h, k, error) : status;
        status = status == ATTN_OK ? hold_row(args, true, row, h, v, error) : status;
    }
    return status;
}

attn_status checked_write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    attn_status status = cpu_ref_kernels->write_kv(args, error);
    bool latent = args->layer->kind == ATTN_LAYER_MLA;
    bool known = cache_number(args->layer) != 0 || latent;
    checked_begin();
    for (int64_t t = 0; t < args->num_slots && known && status == ATTN_OK; t++) {
        checked_clear();
        if (args->slot_mapping[t] >= 0) {
            status = latent ? hold_latent(args, t, error) : hold_heads(args, t, error);
        }
    }
    checked_end();
    return status;
}
