/* SPDX-License-Identifier: Apache-2.0 */
/* attend and its plan: arguments become flash_params, and the kernels that can walk them are chosen. */
#include "instance.h"

#define MAX_MATRIX_SIZE 256

/* Host part of a plan: a replay keeps it, since captured launches were made for it. */
struct plan_host {
    int32_t row_tile;
    int32_t num_reqs;
    int64_t num_pairs; /* upper bound */
};

struct layout {
    size_t parts, tile_start, pair_start, pair_req, arrived, end; /* bytes */
};

static size_t round_up(size_t bytes)
{
    return (bytes + 255) & ~(size_t)255;
}

static struct layout layout_of(const struct attn_instance *instance, const struct attn_state *state,
                               int64_t reqs, int64_t pairs)
{
    struct layout at;
    size_t ctas = (size_t)instance->device.num_sms * FLASH_MAX_CTAS_PER_SM;
    at.parts = 256;
    at.tile_start =
        at.parts + round_up(2 * ctas * 64 * ((size_t)state->padded_size + 2) * sizeof(float));
    at.pair_start = at.tile_start + round_up((size_t)(reqs + 1) * sizeof(int32_t));
    at.pair_req = at.pair_start + round_up((size_t)(pairs + 1) * sizeof(int32_t));
    at.arrived = at.pair_req + round_up((size_t)(pairs + 1) * sizeof(int32_t));
    at.end = at.arrived +
             round_up((size_t)pairs * (size_t)state->num_kv_heads * sizeof(int32_t));
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
    (*state)->padded_size = size <= 64 ? 64 : size <= 128 ? 128 : MAX_MATRIX_SIZE;
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
    int64_t pairs = ((int64_t)limits->max_num_tokens * state->group + 15) / 16 +
                    limits->max_num_reqs;
    size->host_bytes = sizeof(struct plan_host);
    size->device_bytes = layout_of(instance, state, limits->max_num_reqs, pairs).end;
    return ATTN_OK;
}

static struct flash_rows rows_of(const struct attn_tensor *tensor)
{
    int64_t bytes = tensor->dtype.bits / 8;
    return (struct flash_rows){(char *)tensor->data + tensor->byte_offset,
                               tensor_stride(tensor, 0) * bytes, tensor_stride(tensor, 1) * bytes,
                               number_dtype_name(tensor->dtype)};
}

static struct flash_cache cache_of(const struct attn_kv_view *view, const float *scale, float host,
                                   int32_t form)
{
    bool scaled = form != ATTN_SCALE_NONE;
    return (struct flash_cache){
        .data = view->data,
        .block = view->stride_block,
        .slot = view->stride_slot,
        .head = view->stride_head,
        .pack_stride = view->stride_pack,
        .pack = view->pack > 0 && view->pack < view->head_size ? view->pack : 0,
        .scale = scaled ? scale : NULL,
        .scale_host = scaled && host != 0 ? host : 1,
        .scale_per_head = form == ATTN_SCALE_PER_HEAD,
    };
}

static struct flash_cache cache_of_tensor(const struct attn_tensor *tensor)
{
    struct flash_rows rows = rows_of(tensor);
    return (struct flash_cache){
        .data = rows.data, .block = rows.row, .head = rows.head, .scale_host = 1};
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
    p->kv_dtype = layer->kv_dtype;
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
}

static void set_schedule(struct flash_params *p, const struct attn_attend_args *args)
{
    const struct plan_host *plan = args->plan_host;
    char *memory = args->workspace;
    struct layout at = layout_of(args->instance, args->state, plan->num_reqs, plan->num_pairs);
    p->row_tile = plan->row_tile;
    p->header = (int32_t *)memory;
    p->parts = (float *)(memory + at.parts);
    p->tile_start = (int32_t *)(memory + at.tile_start);
    p->pair_start = (int32_t *)(memory + at.pair_start);
    p->pair_req = (int32_t *)(memory + at.pair_req);
    p->arrived = (int32_t *)(memory + at.arrived);
}

static void set_tensors(struct flash_params *p, const struct attn_attend_args *args)
{
    static const int32_t kv_of[ATTN_DTYPE_COUNT] = {ATTN_KV_F16, ATTN_KV_BF16, ATTN_KV_F32};
    const struct attn_layer_params *params = args->params;
    p->q = rows_of(args->q);
    p->out = rows_of(args->out);
    if (args->lse != NULL) {
        p->lse = (float *)((char *)args->lse->data + args->lse->byte_offset);
        p->lse_head = tensor_stride(args->lse, 0);
        p->lse_row = tensor_stride(args->lse, 1);
    }
    if (args->k_cache == NULL) {
        p->k = cache_of_tensor(args->k);
        p->v = cache_of_tensor(args->v);
        p->kv_dtype = kv_of[number_dtype_name(args->k->dtype)];
    } else {
        p->k = cache_of(args->k_cache, params->k_scale, params->k_scale_host,
                        args->layer->k_scale_form);
        p->v = cache_of(args->v_cache, params->v_scale, params->v_scale_host,
                        args->layer->v_scale_form);
    }
}

static uint64_t bits_of(const struct flash_cache *c)
{
    return (uint64_t)(uintptr_t)c->data | (uint64_t)c->block | (uint64_t)c->slot |
           (uint64_t)c->head;
}

/* The matrix kernels copy 16 bytes at a time, and count rows' offsets in 16 bytes and 31 bits. */
static bool matrix_can(const struct flash_params *p, const struct attn_attend_args *args)
{
    bool fp8 = p->kv_dtype == ATTN_KV_FP8_E4M3 || p->kv_dtype == ATTN_KV_FP8_E5M2;
    int32_t same = p->q.dtype == ATTN_DTYPE_BF16 ? ATTN_KV_BF16 : ATTN_KV_F16;
    if (p->q.dtype != ATTN_DTYPE_BF16 && p->q.dtype != ATTN_DTYPE_F16) {
        return false;
    }
    if ((!fp8 && p->kv_dtype != same) || p->head_size > MAX_MATRIX_SIZE ||
        p->head_size_v > MAX_MATRIX_SIZE || p->k.pack != 0 || p->v.pack != 0) {
        return false;
    }
    if (fp8 && (p->head_size % 16 != 0 || p->head_size_v % 16 != 0)) {
        return false;
    }
    uint64_t q = (uint64_t)(uintptr_t)p->q.data | (uint64_t)p->q.row | (uint64_t)p->q.head;
    int64_t rows = args->k_cache != NULL ? args->k_cache->num_blocks : args->k->shape[0];
    return (bits_of(&p->k) | bits_of(&p->v) | q) % 16 == 0 &&
           rows * p->k.block / 16 < INT32_MAX && rows * p->v.block / 16 < INT32_MAX;
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
        plan->row_tile = batch->max_query_len * group <= 32 ? 16 : 64;
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
    return device_status(flash_plan(&args->instance->device, &p, args->stream), "plan", error);
}

attn_status cuda_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    struct flash_params p = {0};
    if (args->q == NULL || args->out == NULL || args->params == NULL || args->state == NULL ||
        args->plan_host == NULL || args->workspace == NULL ||
        (args->k_cache == NULL && (args->k == NULL || args->v == NULL))) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "attend",
                            "q, out, params, a planned workspace, and a cache or k and v are "
                            "needed; one is NULL");
    }
    if (args->batch->num_reqs == 0) {
        return ATTN_OK;
    }
    set_layer(&p, args);
    set_batch(&p, args);
    set_schedule(&p, args);
    set_tensors(&p, args);
    struct flash_device *device = &args->instance->device;
    const char *cause = matrix_can(&p, args) ? flash_attend(device, &p, args->stream)
                                             : flash_attend_plain(device, &p, args->stream);
    return device_status(cause, "attend", error);
}

/* The schedule depends on lengths alone; tables are read when a step runs. */
attn_status cuda_update_block_table(const struct attn_attend_args *args, struct attn_error *error)
{
    (void)args, (void)error;
    return ATTN_OK;
}
