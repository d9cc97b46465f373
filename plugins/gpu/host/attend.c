/* SPDX-License-Identifier: Apache-2.0 */
/* attend: arguments become gpu_params, and the kernel that can walk them is chosen. */
#include "gpu/host/schedule.h"

static void set_tensors(struct gpu_params *p, const struct attn_attend_args *args)
{
    const struct attn_layer_params *params = args->params;
    p->q = gpu_tensor_of(args->q);
    p->out = gpu_tensor_of(args->out);
    p->lse = gpu_lse_of(args->lse);
    set_query_scale(p, args);
    p->p_dtype = -1;
    if (args->layer->p_scale_form != ATTN_SCALE_NONE) {
        bool e5m2 = args->layer->kv_dtype == ATTN_KV_FP8_E5M2;
        p->p_dtype = e5m2 ? ATTN_DTYPE_FP8_E5M2 : ATTN_DTYPE_FP8_E4M3;
        p->p_scale = params->p_scale;
        p->p_scale_host = params->p_scale_host != 0 ? params->p_scale_host : 1;
    }
    if (args->k_cache == NULL) {
        p->k = gpu_cache_of_tensor(args->k, args->layer->head_size);
        p->v = gpu_cache_of_tensor(args->v, args->layer->head_size_v);
    } else {
        p->k = gpu_cache_of(args->layer, params, args->k_cache, false);
        p->v = gpu_cache_of(args->layer, params, args->v_cache, true);
    }
}

static uint64_t bits_of(const struct gpu_cache *c)
{
    return (uint64_t)(uintptr_t)c->data | (uint64_t)c->block | (uint64_t)c->slot |
           (uint64_t)c->head;
}

/* How many CTAs, at most the plan's, with how many stages each multiprocessor holds; the sizes are
 * those of `shape` in sm80_produce.cuh. False: not two stages of one. */
static bool fit_stages(const struct gpu_device *device, int32_t element, struct gpu_params *p)
{
    int32_t size = p->head_size > p->head_size_v ? p->head_size : p->head_size_v;
    int32_t d = size <= 64 ? 64 : size <= 128 ? 128 : GPU_MAX_MATRIX_SIZE;
    bool split = p->tile_rows == 16;
    int32_t stage = 2 * p->tile * d * element + (split || element == 1 ? 1024 : 0);
    int32_t fixed = GPU_FIXED_SMEM + (split ? 2 * 16 : 64) * d * 2;
    for (int32_t ctas = p->ctas / device->num_sms; ctas > 0; ctas--) {
        int32_t room = device->smem_of_sm / ctas - 1024;
        room = room < device->smem_of_cta ? room : device->smem_of_cta;
        p->stages = (room - fixed) / stage;
        if (p->stages >= 2) {
            int32_t most = GPU_ON_THE_WAY / (ctas * 2 * p->tile * d * element);
            most = element == 1 || most > GPU_MAX_STAGES ? GPU_MAX_STAGES : most < 2 ? 2 : most;
            p->stages = p->stages < most ? p->stages : most;
            p->ctas = device->num_sms * ctas;
            return true;
        }
    }
    return false;
}

/* TMA copies boxes of whole blocks: 8 rows are the period of its swizzle. */
static void map_cache(struct gpu_params *p, const struct attn_attend_args *args)
{
    const struct gpu_device *device = &args->instance->device;
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
    p->mapped =
        gpu_device_map(device, &p->k, p->num_kv_heads, rows, blocks, p->box_rows, size,
                       &p->k_map) &&
        gpu_device_map(device, &p->v, p->num_kv_heads, rows, blocks, p->box_rows, size, &p->v_map);
    if (!p->mapped && !p->paged) {
        p->k.slot = p->v.slot = 0;
        p->block_size = 1;
    }
}

/* Whether a matrix kernel walks these arguments. They copy 16 bytes at a time, and count rows'
 * offsets in 16 bytes and 31 bits. */
static bool is_for_matrix(struct gpu_params *p, const struct attn_attend_args *args)
{
    bool narrow = p->k.dtype >= ATTN_DTYPE_FP8_E4M3;
    if ((p->q.dtype != ATTN_DTYPE_BF16 && p->q.dtype != ATTN_DTYPE_F16) ||
        p->k.form >= GPU_ROW_INT4 || p->p_dtype >= 0) {
        return false;
    }
    if (p->k.dtype == ATTN_DTYPE_F32 || p->k.dtype != p->v.dtype ||
        (!narrow && p->k.dtype != p->q.dtype) || p->head_size > GPU_MAX_MATRIX_SIZE ||
        p->head_size_v > GPU_MAX_MATRIX_SIZE || p->k.pack != 0 || p->v.pack != 0) {
        return false;
    }
    if (narrow && (p->head_size % 16 != 0 || p->head_size_v % 16 != 0)) {
        return false;
    }
    uint64_t q = (uint64_t)(uintptr_t)p->q.data | (uint64_t)p->q.row | (uint64_t)p->q.head;
    int64_t rows = args->k_cache != NULL ? args->k_cache->num_blocks : args->k->shape[0];
    if ((bits_of(&p->k) | bits_of(&p->v) | q) % 16 != 0 || rows * p->k.block / 16 >= INT32_MAX ||
        rows * p->v.block / 16 >= INT32_MAX) {
        return false;
    }
    if (p->tile != tile_of(args->state, narrow, p->tile_rows) ||
        !fit_stages(&args->instance->device, narrow ? 1 : 2, p)) {
        return false;
    }
    map_cache(p, args);
    return true;
}

/* Quantized queries as the matrix kernels take them: where they will stand in the workspace. */
static bool widen_query(struct gpu_params *p, struct gpu_widen_params *w,
                        const struct attn_attend_args *args)
{
    const struct plan_host *plan = args->plan_host;
    const struct attn_state *state = args->state;
    if (p->q.dtype < ATTN_DTYPE_FP8_E4M3 || state->query_bytes == 0 ||
        args->batch->num_actual_tokens > plan->num_rows) {
        return false;
    }
    struct layout at = layout_of(args->instance, state, plan->num_reqs, plan->num_row_tiles,
                                 plan->num_rows, plan->by_item);
    bool as_keys = p->k.dtype == ATTN_DTYPE_BF16 || p->k.dtype == ATTN_DTYPE_F16;
    *w = (struct gpu_widen_params){
        .from = p->q,
        .to = {(char *)args->workspace + at.query, state->query_bytes, p->head_size * 2,
               as_keys ? p->k.dtype : ATTN_DTYPE_F16},
        .query_start = p->query_start,
        .num_reqs = p->num_reqs,
        .num_rows = plan->num_rows,
        .heads = p->num_q_heads,
        .dims = p->head_size,
    };
    p->q = w->to;
    return true;
}

static attn_status check_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    if (args->params == NULL || args->state == NULL || args->plan_host == NULL ||
        args->workspace == NULL) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "attend",
                            "params, state and a plan's memory are needed; one is NULL");
    }
    attn_status status = gpu_check_tensor(args->q, "q", error);
    if (status == ATTN_OK) {
        status = gpu_check_tensor(args->out, "out", error);
    }
    if (status == ATTN_OK && args->k_cache == NULL) {
        status = gpu_check_tensor(args->k, "k", error);
        return status == ATTN_OK ? gpu_check_tensor(args->v, "v", error) : status;
    }
    if (status == ATTN_OK) {
        status = gpu_check_view(args->layer, args->params, args->k_cache, false, error);
    }
    if (status == ATTN_OK && args->v_cache == NULL) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "v_cache",
                            "is NULL beside k_cache");
    }
    return status == ATTN_OK ? gpu_check_view(args->layer, args->params, args->v_cache, true, error)
                             : status;
}

attn_status gpu_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    struct gpu_params p = {0};
    attn_status status = check_attend(args, error);
    if (status != ATTN_OK || args->batch->num_reqs == 0) {
        return status;
    }
    set_layer(&p, args);
    set_batch(&p, args);
    set_schedule(&p, args);
    set_tensors(&p, args);
    const struct gpu_device *device = &args->instance->device;
    struct gpu_widen_params widen;
    const char *cause = NULL;
    const struct plan_host *plan = args->plan_host;
    bool taken =
        plan->has_many && args->instance->prefill->attend(args, &p, prefill_memory(args), &cause);
    if (cause != NULL || (taken && !plan->has_few)) {
        return device_status(cause, "attend", error);
    }
    bool widens = widen_query(&p, &widen, args);
    p.overlaps = device->major >= 9;
    if (taken == plan->has_many && is_for_matrix(&p, args)) { /* else all rows are still to do */
        if (widens) {
            cause = gpu_device_launch(device, GPU_KERNEL_widen, (int64_t)device->num_sms * 16,
                                      &widen, args->stream);
        }
        cause = cause != NULL ? cause : gpu_device_attend(device, p.k.dtype, &p, args->stream);
    } else {
        p.q = widens ? widen.from : p.q;
        cause = gpu_device_launch(
            device, p.k.form >= GPU_ROW_INT4 ? GPU_KERNEL_plain_nibbles : GPU_KERNEL_plain,
            (int64_t)device->num_sms * 8, &p, args->stream);
    }
    return device_status(cause, "attend", error);
}
