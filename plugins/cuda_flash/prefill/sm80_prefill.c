/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill of sm_80 and later, host side: which layers and tensors it serves, its schedule and its
 * launch. */
#include "sm80_prefill.h"

#include "cuda_flash/kinds.h"
#include "gpu/cuda/code.h"
#include "gpu/host/schedule.h"
#include "gpu/least_part.h"

#define MOST_SIZE 256 /* larger heads go in items of 16 rows */
#define SLACK 16      /* the schedule counts on 1 / 16 of the CTAs less, and makes longer parts */

/* Whether keys are 8-bit codes without scales of rows: in a cache, or next to the queries of a
 * multimodal encoder. */
static bool has_codes(const struct attn_layer_desc *layer, bool cached)
{
    const int32_t kv = layer->kv_dtype;
    return (cached || layer->encoder == ATTN_ENCODER_MULTIMODAL) &&
           (kv == ATTN_KV_FP8_E4M3 || kv == ATTN_KV_FP8_E5M2);
}

/* CTAs of a multiprocessor, limited by registers and shared memory; 0: not even one fits. */
static int32_t count_ctas(const struct gpu_device *device, const struct attn_prepared *prepared,
                          int32_t tiles)
{
    const int32_t bytes = SM80_PREFILL_SMEM(prepared->padded_size, tiles, SM80_PREFILL_ROWS);
    const int32_t most = prepared->padded_size <= 128 ? 2 : 1;
    const int32_t fitting = device->smem_of_sm / (bytes + 1024);
    return bytes > device->smem_of_cta ? 0 : fitting < most ? fitting : most;
}

/* The widest tiles with which a multiprocessor has as many CTAs as registers allow. */
static int32_t tiles_of(const struct gpu_device *device, const struct attn_layer_desc *layer,
                        const struct attn_prepared *prepared, bool cached)
{
    int32_t tiles = SM80_PREFILL_PAIRS;
    if (has_codes(layer, cached)) {
        return layer->kv_dtype == ATTN_KV_FP8_E4M3 ? SM80_PREFILL_E4M3 : SM80_PREFILL_E5M2;
    }
    while (tiles < SM80_PREFILL_NARROW &&
           count_ctas(device, prepared, tiles) < (prepared->padded_size <= 128 ? 2 : 1)) {
        tiles++;
    }
    return tiles;
}

static int32_t choose_tiles(const struct attn_attend_args *args)
{
    return tiles_of(&args->instance->device, args->layer, args->prepared, args->k_cache != NULL);
}

static const char *load(const struct gpu_device *device, const struct attn_layer_desc *layer,
                        const struct attn_prepared *prepared)
{
    const int32_t own = layer->dtype == ATTN_DTYPE_BF16 ? KIND_BF16 : KIND_F16;
    if (!prepared->prefills) {
        return NULL;
    }
    const char *cause = sm80_prefill_launch(device, own, NULL, NULL);
    return cause != NULL ? cause
           : layer->kv_dtype == ATTN_KV_FP8_E4M3
               ? sm80_prefill_launch(device, KIND_E4M3, NULL, NULL)
           : layer->kv_dtype == ATTN_KV_FP8_E5M2
               ? sm80_prefill_launch(device, KIND_E5M2, NULL, NULL)
               : NULL;
}

/* Keys of 16 bits, and of fp8 with scales of the tensor or its heads; any terms. A layer of
 * batch_invariant 2 has items of 16 rows for prompts and decodes alike. */
static bool may_serve(const struct attn_prepare_args *args, const struct attn_prepared *prepared)
{
    const struct attn_layer_desc *layer = args->layer;
    const struct gpu_device *device = &args->instance->device;
    const int32_t own = layer->dtype == ATTN_DTYPE_BF16 ? ATTN_KV_BF16 : ATTN_KV_F16;
    const bool cached = args->k_cache != NULL, codes = has_codes(layer, cached);
    return layer->dtype != ATTN_DTYPE_F32 && layer->p_scale_form == ATTN_SCALE_NONE &&
           (codes || !cached || layer->kv_dtype == ATTN_KV_AUTO || layer->kv_dtype == own) &&
           (layer->head_size | layer->head_size_v) % (codes ? 16 : 8) == 0 &&
           prepared->padded_size <= MOST_SIZE && prepared->invariant < 2 &&
           count_ctas(device, prepared, tiles_of(device, layer, prepared, cached)) > 0;
}

/* Items of a batch-invariant layer are not cut. */
static bool fits(const struct attn_attend_args *args, int32_t mode)
{
    struct schedule_host *plan = args->schedule_host;
    const int32_t tile = SM80_PREFILL_KEYS(args->prepared->padded_size, choose_tiles(args));
    const int32_t longest = mode == ATTN_PLAN_EAGER ? args->batch->max_seq_len : 0; /* 0: unknown */
    const bool is_short = longest > 0 && longest <= GPU_LEAST_PART * tile;
    plan->part_tiles = is_short || args->prepared->invariant ? 0 : GPU_LEAST_PART;
    return true;
}

static bool pays(const struct attn_attend_args *args)
{
    const struct attn_batch *batch = args->batch;
    const struct schedule_host *plan = args->schedule_host;
    return (int64_t)batch->max_query_len * args->prepared->group > plan->few_rows;
}

static int64_t row_tiles_of(const struct attn_prepared *prepared, int64_t reqs, int64_t tokens,
                            int32_t rows)
{
    return (tokens * prepared->group + rows - 1) / rows + reqs;
}

/* Rows of an item. Items with fewer rows are never cut, and batch-invariant layers have none: rows
 * of a warp decide how a value that is not finite is multiplied. */
static int32_t rows_of(const struct attn_attend_args *args)
{
    const struct schedule_host *plan = args->schedule_host;
    const struct attn_prepared *prepared = args->prepared;
    const int64_t items =
        row_tiles_of(prepared, 0, plan->num_tokens, SM80_PREFILL_ROWS) * args->layer->num_kv_heads;
    return plan->part_tiles == 0 && !prepared->invariant && prepared->padded_size <= 128 &&
                   choose_tiles(args) < SM80_PREFILL_E4M3 && items <= args->instance->device.num_sms
               ? SM80_PREFILL_FEW_ROWS
               : SM80_PREFILL_ROWS;
}

/* Cut items have at most 9 / 4 parts for each CTA: an item that is longer than a share has at most
 * two parts for each share of its tiles (cut_count in gpu/kernels/cut.h), and a share of 8 tiles or
 * more was rounded down by at most a ninth. */
static size_t bytes_of_parts(const struct attn_instance *instance,
                             const struct attn_prepared *prepared)
{
    const size_t ctas = (size_t)instance->device.num_sms * (prepared->padded_size <= 128 ? 2 : 1);
    return gpu_round_up(ctas * 9 / 4 * SM80_PREFILL_ROWS * ((size_t)prepared->padded_size + 2) *
                        sizeof(float));
}

/* Plans of decodes alone need neither. */
static void bytes_of(const struct attn_instance *instance, const struct attn_prepared *prepared,
                     const struct attn_limits *limits, size_t *workspace, size_t *scratch)
{
    const int64_t reqs = limits->max_num_reqs, tokens = limits->max_num_tokens;
    *workspace = *scratch = 0;
    if (limits->max_query_len == 0 ||
        (int64_t)limits->max_query_len * prepared->group > prepared->few_rows) {
        /* items of fewer rows come to no more than one of 128 for each multiprocessor */
        const int64_t row_tiles =
            row_tiles_of(prepared, reqs, tokens, SM80_PREFILL_ROWS) + instance->device.num_sms;
        *workspace = layout_of(instance, prepared, reqs, row_tiles, tokens, true).end;
        *scratch = prepared->invariant ? 0 : bytes_of_parts(instance, prepared);
    }
}

/* Items of requests with more than few_rows rows. */
static void set_items(struct gpu_schedule *s, const struct attn_attend_args *args, char *memory)
{
    const struct schedule_host *plan = args->schedule_host;
    const struct attn_prepared *prepared = args->prepared;
    const struct gpu_device *device = &args->instance->device;
    const int32_t tiles = choose_tiles(args);
    const int32_t ctas = device->num_sms * count_ctas(device, prepared, tiles);
    const int32_t rows = rows_of(args);
    int64_t bytes;
    const struct layout at = layout_of(
        args->instance, prepared, plan->num_reqs,
        row_tiles_of(prepared, plan->num_reqs, plan->num_tokens, rows), plan->num_rows, true);
    *s = (struct gpu_schedule){
        .tile = SM80_PREFILL_KEYS(prepared->padded_size, tiles),
        .tile_rows = rows,
        .least_rows = plan->few_rows + 1,
        .most_rows = INT32_MAX,
        .by_item = 1,
        .concurrent = 1,
        .invariant = plan->part_tiles > 0 ? 0 : 2,
        .ctas = ctas - ctas / SLACK,
        .parts = (float *)(void *)prefill_scratch(args, &bytes),
    };
    place_schedule(s, &at, memory);
}

static const char *make_plan(const struct attn_attend_args *args, const struct gpu_problem *problem,
                             char *memory)
{
    struct gpu_plan_params p = {.problem = *problem};
    set_items(&p.schedule, args, memory);
    return gpu_device_launch(&args->instance->device, GPU_KERNEL_plan, 1, &p, args->stream);
}

/* Whether rows can be copied 16 bytes at a time, by offsets that are counted in 16 bytes with 31
 * bits. */
static bool reads_rows(const struct attn_attend_args *args, const struct gpu_params *p)
{
    const int32_t dtype = p->q.dtype, keys = p->k.dtype;
    const int32_t planned = !has_codes(args->layer, args->k_cache != NULL) ? dtype
                            : args->layer->kv_dtype == ATTN_KV_FP8_E4M3    ? ATTN_DTYPE_FP8_E4M3
                                                                           : ATTN_DTYPE_FP8_E5M2;
    return (dtype == ATTN_DTYPE_BF16 || dtype == ATTN_DTYPE_F16) && keys == planned &&
           p->v.dtype == keys && p->out.dtype == dtype && p->k.form == GPU_ROW_NUMBERS &&
           p->v.form == GPU_ROW_NUMBERS && p->k.pack == 0 && p->v.pack == 0 &&
           gpu_tensor_bits(&p->q) % 16 == 0 && gpu_reads_wide(args, p);
}

static bool attend(const struct attn_attend_args *args, const struct gpu_params *p, char *memory,
                   bool shared, const char **cause)
{
    const struct gpu_device *device = &args->instance->device;
    const struct gpu_problem *problem = &p->problem;
    const int32_t size = args->prepared->padded_size;
    struct sm80_prefill_params a = {
        .p = *p,
        .output = gpu_output_of(args),
        .tiles = choose_tiles(args),
        .ctas = device->num_sms * count_ctas(device, args->prepared, choose_tiles(args)),
        .has_stretches = (!problem->paged || problem->block_size % SM80_PREFILL_STRETCH == 0) &&
                         problem->head_size == size && problem->head_size_v == size,
        .cuts = ((const struct schedule_host *)args->schedule_host)->part_tiles > 0,
        .overlaps = cuda_runs_sm90(device),
    };
    (void)shared;
    if (!reads_rows(args, p)) {
        return false;
    }
    const int32_t tile = SM80_PREFILL_KEYS(size, a.tiles);
    a.page_keys = problem->paged ? problem->block_size : INT32_MAX;
    a.tile_pages = tile / a.page_keys;
    a.tile_slots = tile % a.page_keys;
    for (int32_t side = 0; side < 2; side++) {
        const struct gpu_cache *cache = side == 0 ? &p->k : &p->v;
        const int64_t slot = problem->paged ? cache->slot : cache->block;
        a.strides[side] = (struct sm80_prefill_strides){
            .page = (int32_t)(cache->block / 16),
            .slot = (int32_t)(slot / 16),
            .step = (int32_t)(slot * SM80_PREFILL_STEP(size, a.tiles)),
        };
        a.has_stretches &= slot < INT32_MAX / SM80_PREFILL_STRETCH;
    }
    set_items(&a.p.schedule, args, memory);
    const int32_t kind = a.tiles == SM80_PREFILL_E4M3    ? KIND_E4M3
                         : a.tiles == SM80_PREFILL_E5M2  ? KIND_E5M2
                         : p->q.dtype == ATTN_DTYPE_BF16 ? KIND_BF16
                                                         : KIND_F16;
    *cause = sm80_prefill_launch(device, kind, &a, args->stream);
    return true;
}

const struct gpu_prefill sm80_prefill = {
    .load = load,
    .may_serve = may_serve,
    .fits = fits,
    .pays = pays,
    .bytes = bytes_of,
    .plan = make_plan,
    .attend = attend,
};
