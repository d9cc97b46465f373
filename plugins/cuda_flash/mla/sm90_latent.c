/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla on sm_90a, host side: which layers and batches it serves. */
#include "sm90_latent.h"

#include <attn/mla.h>

#include "gpu/host/schedule.h"

#define LEAST_ROWS 8 /* rows of an item, if a query has more heads than an item has rows */
/* Tiles for each multiprocessor up to which the swap-AB kernel pays: with items of several queries,
 * and of a part of a query's heads. */
#define SWAP_AB_TILES 8
#define SWAP_AB_TILES_OF_PARTS 4

static uint64_t row_bits(const struct attn_kv_view *k)
{
    return (uintptr_t)k->data | (uint64_t)k->stride_block | (uint64_t)k->stride_slot;
}

/* The form of the cache's rows; -1 if they are not served. Numbers of fp8_ds_mla and fp8_ds_v4
 * times their scales are rounded to f16, an error that is negligible in bf16 but not in f16. */
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
    case ATTN_KV_FP8_DS_V4:
        return layer->dtype == ATTN_DTYPE_BF16 ? LATENT_FORM_V4 : -1;
    default:
        return -1;
    }
}

/* Whether rows are latent parts and rope parts in a form that is served, or latent parts alone in
 * bf16 or, at addresses that can be read 16 bytes at a time, fp8_ds_v4. */
static bool serves_rows(const struct attn_layer_desc *layer, const struct attn_kv_view *k)
{
    const int32_t form = form_of(layer), rope = mla_of(layer)->qk_rope_head_dim;
    if (rope > 0) {
        return rope == LATENT_MAX_SIZE - LATENT_MAX_RANK && form >= 0;
    }
    const int64_t scales =
        (int64_t)(uintptr_t)k->scale | k->scale_stride_block | k->scale_stride_slot;
    return layer->dtype == ATTN_DTYPE_BF16 &&
           (form == LATENT_FORM_OWN ||
            (form == LATENT_FORM_V4 && row_bits(k) % 16 == 0 && scales % 2 == 0));
}

/* An item's rows belong to one query, which see the same keys, or to several queries where
 * takes_boxes allows it. The swap-AB kernel applies trees to items that other queries change. */
static bool serves(const struct attn_attend_args *args)
{
    const struct attn_layer_desc *layer = args->layer;
    const struct attn_mla_desc *mla = mla_of(layer);
    int32_t group = args->prepared->group, rows = gpu_latent_rows(SM90_LATENT_ROWS, group);
    bool fits = (rows >= LEAST_ROWS || group <= SM90_LATENT_ROWS) &&
                group / rows <= args->instance->device.num_sms;
    return args->instance->device.major == 9 && mla != NULL && fits &&
           mla->kv_lora_rank == LATENT_MAX_RANK &&
           (layer->dtype == ATTN_DTYPE_BF16 || layer->dtype == ATTN_DTYPE_F16) &&
           serves_rows(layer, args->k_cache) && layer->scale > 0 &&
           layer->q_scale_form == ATTN_SCALE_NONE && layer->alibi == ATTN_ALIBI_NONE &&
           !layer->fast_prefill &&
           (args->prepared->invariant < 2 || layer->tree_mask == ATTN_TREE_NONE);
}

/* Whether TMA can copy blocks in whole periods of its swizzle, 8 rows. */
static bool block_is_boxes(int32_t block_size)
{
    return block_size % GPU_TILE == 0 || (block_size % 8 == 0 && GPU_TILE % block_size == 0);
}

/* Whether TMA copies the keys and each row sees an interval, as items of several queries need.
 * `tree`: a mask over the batch's own keys is allowed as well. */
static bool takes_boxes(const struct attn_attend_args *args, bool tree)
{
    const struct attn_layer_desc *layer = args->layer;
    const struct attn_kv_view *k = args->k_cache;
    return form_of(layer) == LATENT_FORM_OWN && args->prepared->topk == 0 && !layer->prefix_lm &&
           layer->soft_cap <= 0 && (tree || layer->tree_mask == ATTN_TREE_NONE) &&
           args->instance->device.encode_map != NULL && block_is_boxes(k->block_size) &&
           row_bits(k) % 16 == 0;
}

static int32_t least(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

/* Whether items of several queries may be taken. A request's rows are in the same items whatever
 * the batch, but those of the next request may follow and affect row_max of their warp, 16 rows.
 * Where a prefix may be cached, a query has other neighbours, too, which may bring more tiles: with
 * a window they begin earlier, and another warp group gets a tile. Later tiles, which a row does
 * not see, do not change its bits. */
static bool takes_queries(const struct attn_attend_args *args)
{
    const struct attn_layer_desc *layer = args->layer;
    const int32_t invariant = args->prepared->invariant;
    return layer->tree_mask == ATTN_TREE_NONE &&
           (invariant == 0 || args->prepared->group % 16 == 0) &&
           (invariant < 2 || (!layer->has_window && layer->chunk_size == 0));
}

/* An item has all heads of several queries if they fit, else a query's heads or an equal part of
 * them. */
static void choose_rows(const struct attn_attend_args *args, struct schedule_host *plan)
{
    const struct attn_batch *batch = args->batch;
    const int32_t group = args->prepared->group;
    const int32_t most = batch->max_query_len > 0 ? batch->max_query_len : 1;
    const bool tree = args->layer->tree_mask != ATTN_TREE_NONE;
    plan->tile_rows = gpu_latent_rows(SM90_LATENT_ROWS, group);
    if (!takes_boxes(args, true)) {
        return;
    }
    if (group <= SM90_LATENT_ROWS && takes_queries(args)) {
        plan->tile_rows = group * least(most, SM90_LATENT_ROWS / group);
    }
    if (mla_of(args->layer)->qk_rope_head_dim == 0) { /* the swap-AB kernel wants a rope part */
        return;
    }
    int32_t few = group % SWAP_AB_ROWS == 0 ? SWAP_AB_ROWS : 0;
    if (group <= SWAP_AB_ROWS) {
        few = group * least(most, least(SWAP_AB_ROWS / group, SWAP_AB_QUERIES));
    }
    const int64_t keys = ((int64_t)batch->max_seq_len + GPU_TILE - 1) / GPU_TILE;
    const int64_t rows = (int64_t)batch->num_tokens * group;
    const int64_t tiles = group <= SWAP_AB_ROWS ? SWAP_AB_TILES : SWAP_AB_TILES_OF_PARTS;
    const bool pays =
        most * group <= SWAP_AB_ROWS || rows * keys <= tiles * args->instance->device.num_sms * few;
    plan->fast_few =
        few > 0 && ((pays && !args->prepared->invariant) || (tree && group <= SWAP_AB_ROWS));
    plan->tile_rows = plan->fast_few ? few : plan->tile_rows;
}

/* Whether scores have terms: a list of keys, a tree, spans or a soft cap. Then threads copy the
 * rows. The swap-AB kernel applies trees itself and has no other terms. */
static bool has_terms(const struct sm90_latent_params *l)
{
    const struct gpu_problem *problem = &l->p.attend.problem;
    return l->p.topk != NULL || (problem->tree != NULL && !l->swap_ab) || problem->spans != NULL ||
           problem->soft_cap > 0;
}

/* log2 of the block size; -1 if that is no power of two. */
static int32_t shift_of(int32_t block_size)
{
    int32_t shift = -1;
    for (int32_t i = 0; i < 31; i++) {
        shift = block_size == 1 << i ? i : shift;
    }
    return shift;
}

static void map_keys(const struct attn_attend_args *args, struct sm90_latent_params *l)
{
    const struct gpu_cache *k = &l->p.attend.k;
    int32_t block_size = args->k_cache->block_size;
    l->block_shift = shift_of(block_size);
    if (!l->wide_keys || has_terms(l) || l->form != LATENT_FORM_OWN ||
        !block_is_boxes(block_size)) {
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

/* Maps queries of the kernel's type, 64 dims at a time: 64 heads of a token, or the rows of a
 * swap-AB item. Heads after the last read as zeros. */
static void map_queries(const struct attn_attend_args *args, struct sm90_latent_params *l)
{
    const struct gpu_tensor *const parts[2] = {&l->p.attend.q, &l->p.q_rope};
    const int32_t dims[2] = {LATENT_MAX_RANK, LATENT_MAX_SIZE - LATENT_MAX_RANK};
    const int32_t group = l->p.attend.problem.group, rows = l->p.attend.schedule.tile_rows;
    const int32_t queries = rows > group ? rows / group : 1;
    const int32_t heads = queries > 1  ? group
                          : l->swap_ab ? least(group, SWAP_AB_ROWS)
                                       : SM90_LATENT_ROWS;
    l->q_rows = heads * queries;
    l->q_mapped =
        l->wide_queries && (l->form == LATENT_FORM_OWN || l->p.attend.q.dtype == ATTN_DTYPE_F16);
    for (int i = 0; i < 1 + (l->p.rope > 0) && l->q_mapped; i++) {
        const struct map_shape shape = {
            .rank = 4,
            .element = 2,
            .fetched = 128,
            .sizes = {(uint64_t)dims[i], (uint64_t)l->p.attend.problem.group,
                      (uint64_t)args->out->shape[0], 1},
            .strides = {(uint64_t)parts[i]->head, (uint64_t)parts[i]->row, 16},
            .box = {64, (uint32_t)heads, (uint32_t)queries, 1},
        };
        l->q_mapped =
            tensor_map_encode(&args->instance->device, parts[i]->data, &shape, &l->q_maps[i]);
    }
}

static const char wrong_types[] =
    "queries, latent rows and output are not of one type, which the layer said";

/* Everything but who copies keys and queries. */
static struct sm90_latent_params params_of(const struct attn_attend_args *args,
                                           const struct gpu_latent_params *p)
{
    const struct gpu_params *a = &p->attend;
    struct sm90_latent_params l = {.p = *p};
    uint64_t keys = (uint64_t)(uintptr_t)a->k.data | (uint64_t)a->k.block | (uint64_t)a->k.slot;
    l.wide_keys = keys % 16 == 0;
    l.wide_queries = (gpu_tensor_bits(&a->q) | gpu_tensor_bits(&p->q_rope)) % 16 == 0;
    uint64_t out = gpu_tensor_bits(&a->out);
    l.wide_out = out % 16 == 0 ? 8 : out % 4 == 0 ? 2 : 1;
    l.form = form_of(args->layer);
    l.row_bytes = l.form == LATENT_FORM_OWN  ? (p->rank + p->rope) * 2
                  : l.form == LATENT_FORM_DS ? DS_MLA_ROW
                                             : LATENT_MAX_SIZE;
    return l;
}

static const char *attend(const struct attn_attend_args *args, const struct gpu_latent_params *p)
{
    const struct gpu_params *a = &p->attend;
    struct sm90_latent_params l = params_of(args, p);
    if (a->out.dtype != a->q.dtype || p->q_rope.dtype != a->q.dtype ||
        (l.form == LATENT_FORM_OWN && a->k.dtype != a->q.dtype)) {
        return wrong_types;
    }
    l.swap_ab = ((const struct schedule_host *)args->schedule_host)->fast_few;
    map_keys(args, &l);
    map_queries(args, &l);
    if ((!l.mapped && !l.swap_ab && a->schedule.tile_rows > a->problem.group) ||
        !serves_rows(args->layer, args->k_cache)) {
        return "the plan was made for a cache whose rows begin at multiples of 16 bytes, and the "
               "scales of fp8_ds_v4 at multiples of 2";
    }
    return sm90_latent_launch(&args->instance->device, &l, args->stream);
}

static const char *load(const struct gpu_device *device)
{
    return sm90_latent_launch(device, NULL, NULL);
}

/* The caches of a layer whose both caches it attends to. */
static const char *takes_both(const struct attn_kv_view *view)
{
    const int64_t scales =
        (int64_t)(uintptr_t)view->scale | view->scale_stride_block | view->scale_stride_slot;
    return row_bits(view) % 16 == 0 && scales % 2 == 0
               ? NULL
               : "rows of both caches must begin at multiples of 16 bytes, and the scales of "
                 "fp8_ds_v4 at multiples of 2";
}

static const char *attend_both(const struct attn_attend_args *args,
                               const struct gpu_latent_params *p, const struct gpu_cache *second,
                               const struct attn_batch_table *table)
{
    const struct gpu_params *a = &p->attend;
    const struct attn_layer_cache *cache = args->caches;
    const struct attn_layer_desc *layer = args->layer;
    struct sm90_latent_params l = params_of(args, p);
    const int32_t group = a->problem.group, rows = least(group, SM90_LATENT_ROWS);
    if (a->out.dtype != a->q.dtype || (l.form == LATENT_FORM_OWN && a->k.dtype != a->q.dtype)) {
        return wrong_types;
    }
    l.p.attend.schedule.tile_rows = rows;
    l.p.attend.schedule.concurrent = group / rows;
    l.block_shift = shift_of(args->k_cache->block_size);
    l.second = (struct sm90_second_cache){.k = *second,
                                          .block_table = table->block_table,
                                          .block_table_row = table->block_table_row,
                                          .block_table_stride = table->block_table_stride,
                                          .block_size = cache->view->block_size,
                                          .block_shift = shift_of(cache->view->block_size),
                                          .tokens_per_row = cache->tokens_per_row};
    map_queries(args, &l);
    const int64_t longest = args->batch->max_seq_len;
    const int64_t own = layer->has_window && layer->window_left >= 0 && layer->window_left < longest
                            ? layer->window_left + 1
                            : longest;
    const int64_t listed = p->topk != NULL ? p->num_topk : longest / cache->tokens_per_row;
    return sm90_latent_both_launch(
        &args->instance->device, &l, (int64_t)args->batch->num_tokens * (group / rows),
        (int32_t)((own + GPU_TILE - 1) / GPU_TILE + (listed + GPU_TILE - 1) / GPU_TILE),
        args->stream);
}

static const char *load_both(const struct gpu_device *device)
{
    return sm90_latent_both_launch(device, NULL, 0, 0, NULL);
}

const struct gpu_latent_kernel sm90_latent = {
    .rows = SM90_LATENT_ROWS,
    .load = load,
    .serves = serves,
    .choose_rows = choose_rows,
    .attend = attend,
    .load_both = load_both,
    .takes_both = takes_both,
    .attend_both = attend_both,
};
