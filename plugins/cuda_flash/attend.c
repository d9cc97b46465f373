/* SPDX-License-Identifier: Apache-2.0 */
/* attend and its plan: arguments become flash_params, and the kernels that can walk them are
 * chosen. */
#include "instance.h"

#define SEGMENTS_PER_CTA 8
#define NO_KERNEL (-1)

/* Host part of a plan: a replay keeps it, since captured launches were made for it. */
struct plan_host {
    int32_t row_tile;
    int32_t num_reqs;
    int64_t num_pairs; /* upper bound */
};

struct layout {
    size_t segments, pairs, tile_start, pair_start, arrived, parts, end; /* bytes */
    int32_t max_segments;
};

static size_t round_up(size_t bytes)
{
    return (bytes + 255) & ~(size_t)255;
}

/* Segments of a plan, and how many of them may leave parts of 16 rows. Parts of 64 rows are fewer:
 * there each CTA has one segment. */
static int64_t segment_bound(const struct attn_instance *instance, const struct attn_state *state,
                             int64_t reqs, int64_t pairs, int64_t *part_rows)
{
    int64_t ctas = (int64_t)instance->device.num_sms * (state->padded_size > 128 ? 1 : 2);
    if (state->invariant) {
        int64_t cut = reqs * state->num_kv_heads * FLASH_INVARIANT_CUTS;
        *part_rows = cut * 16;
        return cut + pairs * state->num_kv_heads + ctas; /* one that is read for each CTA */
    }
    int64_t taken = 2 * ctas * SEGMENTS_PER_CTA * 16, given = 2 * ctas * 64;
    *part_rows = taken > given ? taken : given;
    return ctas * SEGMENTS_PER_CTA;
}

static struct layout layout_of(const struct attn_instance *instance, const struct attn_state *state,
                               int64_t reqs, int64_t pairs)
{
    struct layout at;
    int64_t part_rows, segments = segment_bound(instance, state, reqs, pairs, &part_rows);
    at.max_segments = (int32_t)segments;
    at.segments = round_up(sizeof(struct flash_header));
    at.pairs = at.segments + round_up((size_t)segments * sizeof(struct flash_segment));
    at.tile_start = at.pairs + round_up((size_t)(pairs + 1) * sizeof(struct flash_pair));
    at.pair_start = at.tile_start + round_up((size_t)(reqs + 1) * sizeof(int32_t));
    at.arrived = at.pair_start + round_up((size_t)(pairs + 1) * sizeof(int32_t));
    at.parts = at.arrived + round_up((size_t)pairs * (size_t)state->num_kv_heads * sizeof(int32_t));
    at.end =
        at.parts + round_up((size_t)part_rows * ((size_t)state->padded_size + 2) * sizeof(float));
    return at;
}

attn_status cuda_prepare(attn_instance *instance, const struct attn_layer_desc *layer,
                         const struct attn_layer_params *params, int32_t phase, attn_state **state,
                         struct attn_error *error)
{
    const struct attn_host *host = instance->host;
    int32_t size = layer->head_size > layer->head_size_v ? layer->head_size : layer->head_size_v;
    (void)params, (void)phase;
    *state = NULL;
    if (layer->num_kv_heads <= 0 || layer->num_q_heads % layer->num_kv_heads != 0) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "num_q_heads",
                            "%d query heads over %d KV heads; must be a multiple",
                            layer->num_q_heads, layer->num_kv_heads);
    }
    *state = host->allocate(host->user, sizeof **state, 64);
    if (*state == NULL) {
        return plugin_error(error, ATTN_ERROR_OUT_OF_MEMORY, "state", "%zu bytes", sizeof **state);
    }
    (*state)->num_kv_heads = layer->num_kv_heads;
    (*state)->group = layer->num_q_heads / layer->num_kv_heads;
    (*state)->padded_size = size <= 64 ? 64 : size <= 128 ? 128 : FLASH_MAX_MATRIX_SIZE;
    (*state)->invariant = layer->batch_invariant != 0;
    (*state)->narrow = layer->kv_dtype >= ATTN_KV_FP8_E4M3;
    return ATTN_OK;
}

void cuda_release(attn_instance *instance, attn_state *state)
{
    if (state != NULL) {
        instance->host->release(instance->host->user, state, sizeof *state);
    }
}

attn_status cuda_plan_size(attn_instance *instance, attn_state *state,
                           const struct attn_limits *limits, struct attn_plan_size *size,
                           struct attn_error *error)
{
    if (state == NULL || limits == NULL || limits->max_num_reqs < 0 || limits->max_num_tokens < 0) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, state == NULL ? "state" : "limits",
                            "a prepared state and limits from 0 are needed");
    }
    int64_t pairs =
        ((int64_t)limits->max_num_tokens * state->group + 15) / 16 + limits->max_num_reqs;
    size->host_bytes = sizeof(struct plan_host);
    size->device_bytes = layout_of(instance, state, limits->max_num_reqs, pairs).end;
    return ATTN_OK;
}

static void set_layer(struct flash_params *p, const struct attn_attend_args *args)
{
    const struct attn_layer_desc *layer = args->layer;
    p->num_q_heads = layer->num_q_heads;
    p->num_kv_heads = layer->num_kv_heads;
    p->group = layer->num_q_heads / layer->num_kv_heads;
    p->head_size = layer->head_size;
    p->head_size_v = layer->head_size_v;
    p->window_left = layer->has_window ? layer->window_left : -1;
    p->window_right = layer->has_window ? layer->window_right : -1;
    p->chunk_size = layer->chunk_size;
    p->chunk_lookback = layer->chunk_lookback;
    p->alibi = layer->alibi;
    p->prefix_lm_window = layer->prefix_lm_window;
    p->tree_mask = layer->tree_mask;
    p->scale = layer->scale;
    p->soft_cap = layer->soft_cap;
    p->sinks = layer->has_sinks ? args->params->sinks : NULL;
    p->slopes = layer->alibi != ATTN_ALIBI_NONE ? args->params->alibi_slopes : NULL;
}

static void set_batch(struct flash_params *p, const struct attn_attend_args *args)
{
    const struct attn_batch *batch = args->batch;
    const struct attn_layer_desc *layer = args->layer;
    p->num_reqs = batch->num_reqs;
    p->causal = batch->causal == -1 ? layer->causal : batch->causal;
    p->causal_per_request = layer->causal_per_request ? batch->causal_per_request : NULL;
    p->query_start = batch->query_start_loc;
    p->key_start = batch->key_start_loc != NULL ? batch->key_start_loc : batch->query_start_loc;
    p->seq_lens = batch->seq_lens;
    p->block_table = batch->block_table;
    p->block_table_row = batch->block_table_row;
    p->block_table_stride = batch->block_table_stride;
    p->spans = layer->prefix_lm && batch->span_start_loc != NULL ? batch->spans : NULL;
    p->span_start = batch->span_start_loc;
    p->tree = layer->tree_mask != ATTN_TREE_NONE ? batch->tree : NULL;
    p->tree_request = batch->tree_stride_request;
    p->tree_row = batch->tree_stride_row;
    p->paged = args->k_cache != NULL;
    p->block_size = args->k_cache != NULL ? args->k_cache->block_size : 1;
    p->wanted_rows = layer->fast_prefill ? batch->logits_indices : NULL;
    p->num_wanted_rows = batch->num_logits_indices;
}

/* Keys of a tile, as `shape` in produce.cuh has it. */
static int32_t tile_of(const struct attn_state *state, bool cached, int32_t row_tile)
{
    return state->narrow && cached && row_tile == 16 && state->padded_size <= 128
               ? FLASH_NARROW_TILE
               : FLASH_TILE;
}

static void set_schedule(struct flash_params *p, const struct attn_attend_args *args)
{
    const struct plan_host *plan = args->plan_host;
    const struct attn_state *state = args->state;
    const struct flash_device *device = &args->instance->device;
    char *memory = args->workspace;
    struct layout at = layout_of(args->instance, state, plan->num_reqs, plan->num_pairs);
    p->row_tile = plan->row_tile;
    p->invariant = state->invariant;
    p->ctas = device->num_sms * (state->padded_size > 128 ? 1 : 2);
    p->tile = tile_of(state, args->k_cache != NULL, plan->row_tile);
    p->max_segments = plan->row_tile == 16 || state->invariant ? at.max_segments : p->ctas;
    p->header = (struct flash_header *)memory;
    p->segments = (struct flash_segment *)(memory + at.segments);
    p->pairs = (struct flash_pair *)(memory + at.pairs);
    p->tile_start = (int32_t *)(memory + at.tile_start);
    p->pair_start = (int32_t *)(memory + at.pair_start);
    p->arrived = (int32_t *)(memory + at.arrived);
    p->parts = (float *)(memory + at.parts);
}

static void set_tensors(struct flash_params *p, const struct attn_attend_args *args)
{
    const struct attn_layer_params *params = args->params;
    p->q = flash_rows_of(args->q);
    p->out = flash_rows_of(args->out);
    p->lse = flash_lse_of(args->lse);
    p->q_scale_host = 1;
    if (args->layer->q_scale_form != ATTN_SCALE_NONE) {
        p->q_scale = params->q_scale;
        p->q_scale_host = params->q_scale_host != 0 ? params->q_scale_host : 1;
        p->q_scale_per_head = args->layer->q_scale_form == ATTN_SCALE_PER_HEAD;
    }
    p->p_dtype = -1;
    if (args->layer->p_scale_form != ATTN_SCALE_NONE) {
        bool e5m2 = args->layer->kv_dtype == ATTN_KV_FP8_E5M2;
        p->p_dtype = e5m2 ? ATTN_DTYPE_FP8_E5M2 : ATTN_DTYPE_FP8_E4M3;
        p->p_scale = params->p_scale;
        p->p_scale_host = params->p_scale_host != 0 ? params->p_scale_host : 1;
    }
    if (args->k_cache == NULL) {
        p->k = flash_cache_of_rows(args->k, args->layer->head_size);
        p->v = flash_cache_of_rows(args->v, args->layer->head_size_v);
    } else {
        p->k = flash_cache_of(args->layer, params, args->k_cache, false);
        p->v = flash_cache_of(args->layer, params, args->v_cache, true);
    }
}

static uint64_t bits_of(const struct flash_cache *c)
{
    return (uint64_t)(uintptr_t)c->data | (uint64_t)c->block | (uint64_t)c->slot |
           (uint64_t)c->head;
}

/* How many CTAs with how many stages each multiprocessor holds; the sizes are those of `shape` in
 * produce.cuh. False: not two stages of one. */
static bool fit_stages(const struct flash_device *device, int32_t element, struct flash_params *p)
{
    int32_t size = p->head_size > p->head_size_v ? p->head_size : p->head_size_v;
    int32_t d = size <= 64 ? 64 : size <= 128 ? 128 : FLASH_MAX_MATRIX_SIZE;
    bool split = p->row_tile == 16;
    int32_t stage = 2 * p->tile * d * element + (split || element == 1 ? 1024 : 0);
    int32_t fixed = FLASH_FIXED_SMEM + (split ? 2 * 16 : 64) * d * 2;
    for (int32_t ctas = d > 128 ? 1 : 2; ctas > 0; ctas--) {
        int32_t room = device->smem_of_sm / ctas - 1024;
        room = room < device->smem_of_cta ? room : device->smem_of_cta;
        p->stages = (room - fixed) / stage;
        if (p->stages >= 2) {
            p->stages = p->stages < FLASH_MAX_STAGES ? p->stages : FLASH_MAX_STAGES;
            p->ctas = device->num_sms * ctas;
            return true;
        }
    }
    return false;
}

/* TMA copies boxes of whole blocks: 8 rows are the period of its swizzle. */
static void map_cache(struct flash_params *p, const struct attn_attend_args *args)
{
    const struct flash_device *device = &args->instance->device;
    int32_t size = args->state->padded_size;
    int64_t rows = p->block_size, blocks = 1;
    p->box_rows = p->tile;
    if (p->paged) {
        bool even = p->block_size % p->tile == 0 ||
                    (p->block_size % 8 == 0 && p->tile % p->block_size == 0);
        if (!even) {
            return;
        }
        blocks = args->k_cache->num_blocks;
        p->box_rows = p->block_size < p->tile ? p->block_size : p->tile;
    } else { /* one block of all rows */
        rows = args->k->shape[0] < args->v->shape[0] ? args->k->shape[0] : args->v->shape[0];
        p->k.slot = p->k.block;
        p->v.slot = p->v.block;
        p->block_size = (int32_t)rows;
    }
    p->mapped = flash_encode_map(device, &p->k, p->num_kv_heads, rows, blocks, p->box_rows, size,
                                 &p->k_map) &&
                flash_encode_map(device, &p->v, p->num_kv_heads, rows, blocks, p->box_rows, size,
                                 &p->v_map);
    if (!p->mapped && !p->paged) {
        p->k.slot = p->v.slot = 0;
        p->block_size = 1;
    }
}

/* The matrix kernel of these arguments, or NO_KERNEL. They copy 16 bytes at a time, and count rows'
 * offsets in 16 bytes and 31 bits. */
static int32_t matrix_kernel(struct flash_params *p, const struct attn_attend_args *args)
{
    static const int32_t kernels[ATTN_DTYPE_COUNT] = {
        FLASH_ATTEND_F16,  FLASH_ATTEND_BF16, NO_KERNEL,        FLASH_ATTEND_E4M3,
        FLASH_ATTEND_E5M2, NO_KERNEL,         FLASH_ATTEND_INT8};
    bool narrow = p->k.dtype >= ATTN_DTYPE_FP8_E4M3;
    if ((p->q.dtype != ATTN_DTYPE_BF16 && p->q.dtype != ATTN_DTYPE_F16) ||
        p->k.form >= FLASH_ROW_INT4 || p->p_dtype >= 0) {
        return NO_KERNEL;
    }
    if (p->k.dtype != p->v.dtype || (!narrow && p->k.dtype != p->q.dtype) ||
        p->head_size > FLASH_MAX_MATRIX_SIZE || p->head_size_v > FLASH_MAX_MATRIX_SIZE ||
        p->k.pack != 0 || p->v.pack != 0) {
        return NO_KERNEL;
    }
    if (narrow && (p->head_size % 16 != 0 || p->head_size_v % 16 != 0)) {
        return NO_KERNEL;
    }
    uint64_t q = (uint64_t)(uintptr_t)p->q.data | (uint64_t)p->q.row | (uint64_t)p->q.head;
    int64_t rows = args->k_cache != NULL ? args->k_cache->num_blocks : args->k->shape[0];
    if ((bits_of(&p->k) | bits_of(&p->v) | q) % 16 != 0 || rows * p->k.block / 16 >= INT32_MAX ||
        rows * p->v.block / 16 >= INT32_MAX) {
        return NO_KERNEL;
    }
    if (p->tile != tile_of(args->state, narrow, p->row_tile) ||
        !fit_stages(&args->instance->device, narrow ? 1 : 2, p)) {
        return NO_KERNEL;
    }
    map_cache(p, args);
    return kernels[p->k.dtype];
}

attn_status cuda_plan(const struct attn_attend_args *args, int32_t mode, struct attn_error *error)
{
    struct plan_host *plan = args->plan_host;
    const struct attn_batch *batch = args->batch;
    struct flash_params p = {0};
    if (plan == NULL || args->workspace == NULL || args->state == NULL) {
        return plugin_error(error, ATTN_ERROR_WORKSPACE, "workspace",
                            "a plan needs its state, host memory and workspace");
    }
    if (mode != ATTN_PLAN_REPLAY && mode != ATTN_PLAN_IN_GRAPH) {
        int64_t group = args->state->group;
        bool few = args->state->invariant || batch->max_query_len * group <= 32;
        plan->row_tile = few ? 16 : 64;
        plan->num_reqs = batch->num_reqs;
        plan->num_pairs =
            (batch->num_tokens * group + plan->row_tile - 1) / plan->row_tile + batch->num_reqs;
    }
    if (mode == ATTN_PLAN_OUT_OF_GRAPH || batch->num_reqs == 0) {
        return ATTN_OK;
    }
    set_layer(&p, args);
    set_batch(&p, args);
    set_schedule(&p, args);
    return device_status(flash_launch(&args->instance->device, FLASH_PLAN, &p, args->stream),
                         "plan", error);
}

static attn_status check_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    if (args->params == NULL || args->state == NULL || args->plan_host == NULL ||
        args->workspace == NULL) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "attend",
                            "params, state and a plan's memory are needed; one is NULL");
    }
    attn_status status = flash_check_rows(args->q, "q", error);
    if (status == ATTN_OK) {
        status = flash_check_rows(args->out, "out", error);
    }
    if (status == ATTN_OK && args->k_cache == NULL) {
        status = flash_check_rows(args->k, "k", error);
        return status == ATTN_OK ? flash_check_rows(args->v, "v", error) : status;
    }
    if (status == ATTN_OK) {
        status = flash_check_view(args->layer, args->params, args->k_cache, false, error);
    }
    if (status == ATTN_OK && args->v_cache == NULL) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "v_cache",
                            "is NULL beside k_cache");
    }
    return status == ATTN_OK
               ? flash_check_view(args->layer, args->params, args->v_cache, true, error)
               : status;
}

attn_status cuda_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    struct flash_params p = {0};
    attn_status status = check_attend(args, error);
    if (status != ATTN_OK || args->batch->num_reqs == 0) {
        return status;
    }
    set_layer(&p, args);
    set_batch(&p, args);
    set_schedule(&p, args);
    set_tensors(&p, args);
    const struct flash_device *device = &args->instance->device;
    int32_t kernel = matrix_kernel(&p, args);
    p.overlaps = device->major >= 9;
    kernel = kernel == NO_KERNEL ? FLASH_ATTEND_PLAIN : kernel;
    return device_status(flash_launch(device, (enum flash_kernel)kernel, &p, args->stream),
                         "attend", error);
}

/* The schedule depends on lengths alone; tables are read when a step runs. */
attn_status cuda_update_block_table(const struct attn_attend_args *args, struct attn_error *error)
{
    (void)args, (void)error;
    return ATTN_OK;
}
