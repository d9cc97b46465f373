/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla on sm_90a, host side: which layers and batches it takes. */
#include "sm90_latent.h"

#include <attn/mla.h>

#include "gpu/host/schedule.h"

/* Rows of a tile have to see the same keys, so that what one does not see is no number that another
 * has: they are of one query. What pays for the batch may not choose in batch-invariant layers. */
static bool serves(const struct attn_attend_args *args)
{
    const struct attn_layer_desc *layer = args->layer;
    const struct attn_mla_desc *mla =
        (const struct attn_mla_desc *)gpu_find_ext(layer->next, ATTN_EXT_MLA_DESC);
    int32_t own = layer->dtype == ATTN_DTYPE_BF16 ? ATTN_KV_BF16 : ATTN_KV_F16;
    bool whole = args->prepared->group % SM90_LATENT_ROWS == 0;
    return args->instance->device.major == 9 && mla != NULL &&
           mla->kv_lora_rank == LATENT_MAX_RANK &&
           mla->qk_rope_head_dim == LATENT_MAX_SIZE - LATENT_MAX_RANK &&
           (layer->dtype == ATTN_DTYPE_BF16 || layer->dtype == ATTN_DTYPE_F16) &&
           (layer->kv_dtype == ATTN_KV_AUTO || layer->kv_dtype == own) && layer->scale > 0 &&
           layer->q_scale_form == ATTN_SCALE_NONE && layer->k_scale_form == ATTN_SCALE_NONE &&
           layer->soft_cap == 0 && layer->alibi == ATTN_ALIBI_NONE &&
           layer->tree_mask == ATTN_TREE_NONE && !layer->prefix_lm && !layer->fast_prefill &&
           (whole || (!layer->batch_invariant && args->batch->max_query_len <= 1));
}

static uint64_t bits_of_rows(const struct gpu_tensor *r)
{
    return (uint64_t)(uintptr_t)r->data | (uint64_t)r->row | (uint64_t)r->head;
}

/* TMA copies boxes of whole blocks: 8 rows are the period of its swizzle. */
static void map_keys(const struct attn_attend_args *args, struct sm90_latent_params *l)
{
    const struct gpu_cache *k = &l->p.attend.k;
    int32_t block_size = args->k_cache->block_size;
    if (!l->wide_keys ||
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

static const char *attend(const struct attn_attend_args *args, const struct gpu_latent_params *p)
{
    const struct gpu_params *a = &p->attend;
    struct sm90_latent_params l = {.p = *p};
    uint64_t keys = (uint64_t)(uintptr_t)a->k.data | (uint64_t)a->k.block | (uint64_t)a->k.slot;
    l.wide_keys = keys % 16 == 0;
    l.wide_queries = (bits_of_rows(&a->q) | bits_of_rows(&p->q_rope)) % 16 == 0;
    l.wide_out = bits_of_rows(&a->out) % 4 == 0;
    if (a->out.dtype != a->q.dtype || a->k.dtype != a->q.dtype || p->q_rope.dtype != a->q.dtype) {
        return "queries, latent rows and output are not of one type, which the layer said";
    }
    map_keys(args, &l);
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
