/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla on sm_90a, host side: which layers and batches it takes. */
#include "sm90_latent.h"

#include <attn/mla.h>

#include "gpu/host/schedule.h"

#define LEAST_ROWS 8 /* of an item, where a query's heads are more than one item has */

/* Rows of the cache as the kernel takes them; -1: it does not. fp8_ds_mla's numbers times their
 * scales are rounded to f16, which is nothing next to bf16, but not next to f16. */
static int32_t form_of(const struct attn_layer_desc *layer)
{
    int32_t own = layer->dtype == ATTN_DTYPE_BF16 ? ATTN_KV_BF16 : ATTN_KV_F16;
    if (layer->kv_dtype == ATTN_KV_AUTO || layer->kv_dtype == own) {
        return layer->k_scale_form == ATTN_SCALE_NONE ? LATENT_FORM_OWN : -1;
    }
    switch (layer->kv_dtype) {
    case ATTN_KV_FP8_E4M3:
        return LATENT_FORM_E4M3;
    case ATTN_KV_FP8_E5M2:
        return LATENT_FORM_E5M2;
    case ATTN_KV_FP8_DS_MLA:
        return layer->dtype == ATTN_DTYPE_BF16 ? LATENT_FORM_DS : -1;
    default:
        return -1;
    }
}

/* Of an item's rows, which are one query's, all see the same keys: what one does not see is no
 * number that another has. */
static bool serves(const struct attn_attend_args *args)
{
    const struct attn_layer_desc *layer = args->layer;
    const struct attn_mla_desc *mla = mla_of(layer);
    int32_t group = args->prepared->group, rows = gpu_latent_rows(SM90_LATENT_ROWS, group);
    bool fits = (rows >= LEAST_ROWS || group <= SM90_LATENT_ROWS) &&
                group / rows <= args->instance->device.num_sms;
    return args->instance->device.major == 9 && mla != NULL && fits &&
           mla->kv_lora_rank == LATENT_MAX_RANK &&
           mla->qk_rope_head_dim == LATENT_MAX_SIZE - LATENT_MAX_RANK &&
           (layer->dtype == ATTN_DTYPE_BF16 || layer->dtype == ATTN_DTYPE_F16) &&
           form_of(layer) >= 0 && layer->scale > 0 && layer->q_scale_form == ATTN_SCALE_NONE &&
           layer->alibi == ATTN_ALIBI_NONE && !layer->fast_prefill;
}

static uint64_t bits_of_rows(const struct gpu_tensor *r)
{
    return (uint64_t)(uintptr_t)r->data | (uint64_t)r->row | (uint64_t)r->head;
}

/* A list of keys, a tree, spans or a soft cap: threads copy the rows, and scores have terms. */
static bool has_terms(const struct gpu_latent_params *p)
{
    const struct gpu_problem *problem = &p->attend.problem;
    return p->topk != NULL || problem->tree != NULL || problem->spans != NULL ||
           problem->soft_cap > 0;
}

/* TMA copies boxes of whole blocks: 8 rows are the period of its swizzle. */
static void map_keys(const struct attn_attend_args *args, struct sm90_latent_params *l)
{
    const struct gpu_cache *k = &l->p.attend.k;
    int32_t block_size = args->k_cache->block_size;
    l->block_shift = -1;
    for (int32_t i = 0; i < 31; i++) {
        l->block_shift = block_size == 1 << i ? i : l->block_shift;
    }
    if (!l->wide_keys || has_terms(&l->p) || l->form != LATENT_FORM_OWN ||
        (block_size % GPU_TILE != 0 && (block_size % 8 != 0 || GPU_TILE % block_size != 0))) {
        return;
    }
    l->box_rows = block_size < GPU_TILE ? block_size : GPU_TILE;
    const struct map_shape shape = {
        .rank = 4,
        .element = 2,
        .fetched = 128,
        .sizes = {(uint64_t)k->head_size, (uint64_t)block_size, 1,
                  (uint64_t)args->k_cache->num_blocks},
        .strides = {(uint64_t)k->slot, (uint64_t)k->slot, (uint64_t)k->block},
        .box = {64, (uint32_t)l->box_rows, 1, 1},
    };
    l->mapped = tensor_map_encode(&args->instance->device, k->data, &shape, &l->k_map);
}

/* Queries in the kernel's type: 64 heads of a token, 64 dims at a time. Behind the last head are
 * zeros. */
static void map_queries(const struct attn_attend_args *args, struct sm90_latent_params *l)
{
    const struct gpu_tensor *const parts[2] = {&l->p.attend.q, &l->p.q_rope};
    const int32_t dims[2] = {LATENT_MAX_RANK, LATENT_MAX_SIZE - LATENT_MAX_RANK};
    l->q_mapped =
        l->wide_queries && (l->form == LATENT_FORM_OWN || l->p.attend.q.dtype == ATTN_DTYPE_F16);
    for (int i = 0; i < 2 && l->q_mapped; i++) {
        const struct map_shape shape = {
            .rank = 4,
            .element = 2,
            .fetched = 128,
            .sizes = {(uint64_t)dims[i], (uint64_t)l->p.attend.problem.group,
                      (uint64_t)args->out->shape[0], 1},
            .strides = {(uint64_t)parts[i]->head, (uint64_t)parts[i]->row, 16},
            .box = {64, SM90_LATENT_ROWS, 1, 1},
        };
        l->q_mapped =
            tensor_map_encode(&args->instance->device, parts[i]->data, &shape, &l->q_maps[i]);
    }
}

static const char *attend(const struct attn_attend_args *args, const struct gpu_latent_params *p)
{
    const struct gpu_params *a = &p->attend;
    struct sm90_latent_params l = {.p = *p};
    uint64_t keys = (uint64_t)(uintptr_t)a->k.data | (uint64_t)a->k.block | (uint64_t)a->k.slot;
    l.wide_keys = keys % 16 == 0;
    l.wide_queries = (bits_of_rows(&a->q) | bits_of_rows(&p->q_rope)) % 16 == 0;
    uint64_t out = bits_of_rows(&a->out);
    l.wide_out = out % 16 == 0 ? 8 : out % 4 == 0 ? 2 : 1;
    l.form = form_of(args->layer);
    if (a->out.dtype != a->q.dtype || p->q_rope.dtype != a->q.dtype ||
        (l.form == LATENT_FORM_OWN && a->k.dtype != a->q.dtype)) {
        return "queries, latent rows and output are not of one type, which the layer said";
    }
    l.row_bytes = l.form == LATENT_FORM_OWN  ? LATENT_MAX_SIZE * 2
                  : l.form == LATENT_FORM_DS ? DS_MLA_ROW
                                             : LATENT_MAX_SIZE;
    map_keys(args, &l);
    map_queries(args, &l);
    return sm90_latent_launch(&args->instance->device, &l, args->stream);
}

static const char *load(const struct gpu_device *device)
{
    return sm90_latent_launch(device, NULL, NULL);
}

const struct gpu_latent_kernel sm90_latent = {
    .rows = SM90_LATENT_ROWS,
    .load = load,
    .serves = serves,
    .attend = attend,
};
