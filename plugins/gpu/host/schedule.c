/* SPDX-License-Identifier: Apache-2.0 */
/* The preparation of a layer, the memory of its plans, and the launch of the kernel that makes a
 * schedule. */
#include <attn/draft/compressed.h>
#include <attn/draft/compressor.h>
#include <attn/indexer.h>
#include <attn/mla.h>

#include "common/recurrent.h"
#include "common/turboquant.h"
#include "gpu/host/backend.h"
#include "gpu/host/schedule.h"

#define SEGMENTS_PER_CTA 8
#define LEAST_SHARE 4        /* tiles of a share with by_item 2 */
#define LEAST_SHARE_OF_FEW 2 /* parts of such plans have fewer rows */
#define LEAST_SHARE_OF_LISTS 1
#define FEW_KEYS 4096       /* keys of a batch that parts of 16 rows read sooner */
#define PADDED_SIZE_MAX 512 /* head size of the matrix kernels */

/* The segments of a plan, and how many of them may leave parts of 16 rows. With 64 rows there are
 * fewer parts, since each CTA has one segment. Where a prefix may be cached, no item is cut. */
static int64_t segment_bound(const struct attn_instance *instance,
                             const struct attn_prepared *prepared, int64_t reqs, int64_t row_tiles,
                             bool by_item, int64_t *part_rows)
{
    int64_t ctas = (int64_t)instance->device.num_sms * (prepared->padded_size > 128 ? 1
                                                        : prepared->dense           ? 3
                                                                                    : 2);
    if (by_item) {
        int64_t cut = 4 * ctas; /* cut_count in gpu/kernels/cut.h */
        if (prepared->invariant) {
            cut = prepared->invariant >= 2 ? 0 : reqs * prepared->num_kv_heads * GPU_INVARIANT_CUTS;
        }
        *part_rows = cut * 16;
        if (prepared->way == GPU_WAY_LATENT && instance->latent != NULL) {
            int64_t parts = prepared->invariant ? cut : 2 * ctas; /* two for each share */
            *part_rows = parts * instance->latent->rows;
            *part_rows = *part_rows > cut * 16 ? *part_rows : cut * 16;
        }
        return cut + row_tiles * prepared->num_kv_heads + ctas; /* one read by each CTA */
    }
    int64_t taken = 2 * ctas * SEGMENTS_PER_CTA * 16, given = 2 * ctas * 64;
    *part_rows = taken > given ? taken : given;
    return ctas * SEGMENTS_PER_CTA;
}

struct layout layout_of(const struct attn_instance *instance, const struct attn_prepared *prepared,
                        int64_t reqs, int64_t row_tiles, int64_t rows, bool by_item)
{
    struct layout at;
    int64_t part_rows,
        segments = segment_bound(instance, prepared, reqs, row_tiles, by_item, &part_rows);
    at.max_segments = (int32_t)segments;
    at.segments = gpu_round_up(sizeof(struct gpu_header));
    at.row_tiles = at.segments + gpu_round_up((size_t)segments * sizeof(struct gpu_segment));
    at.row_tile_start =
        at.row_tiles + gpu_round_up((size_t)(row_tiles + 1) * sizeof(struct gpu_row_tile));
    at.key_tile_start = at.row_tile_start + gpu_round_up((size_t)(reqs + 1) * sizeof(int32_t));
    at.arrived = at.key_tile_start + gpu_round_up((size_t)(row_tiles + 1) * sizeof(int32_t));
    at.end = at.arrived +
             gpu_round_up((size_t)row_tiles * (size_t)prepared->num_kv_heads * sizeof(int32_t));
    at.parts = 0;
    at.query =
        gpu_round_up((size_t)part_rows * ((size_t)prepared->padded_size + 2) * sizeof(float));
    at.out = at.query + gpu_round_up((size_t)rows * (size_t)prepared->query_bytes);
    at.scratch_end = at.out + gpu_round_up((size_t)rows * (size_t)prepared->out_bytes);
    return at;
}

struct layout layout_of_plan(const struct attn_attend_args *args)
{
    const struct schedule_host *plan = args->schedule_host;
    return layout_of(args->instance, args->prepared, plan->num_reqs, plan->num_row_tiles,
                     plan->num_rows, plan->by_item);
}

void place_schedule(struct gpu_schedule *s, const struct layout *at, char *memory)
{
    s->max_segments = at->max_segments;
    s->header = (struct gpu_header *)memory;
    s->segments = (struct gpu_segment *)(memory + at->segments);
    s->row_tiles = (struct gpu_row_tile *)(memory + at->row_tiles);
    s->row_tile_start = (int32_t *)(memory + at->row_tile_start);
    s->key_tile_start = (int32_t *)(memory + at->key_tile_start);
    s->arrived = (int32_t *)(memory + at->arrived);
}

static void prepare_layer(const struct attn_prepare_args *args, struct attn_prepared *prepared)
{
    const attn_instance *instance = args->instance;
    const struct attn_layer_desc *layer = args->layer;
    int32_t size = layer->head_size > layer->head_size_v ? layer->head_size : layer->head_size_v;
    const struct attn_mla_desc *mla = mla_of(layer);
    const bool is_sparse = mla != NULL && mla->topk > 0;
    /* where a prefix may be cached, all tokens go one by one */
    if (layer->kind == ATTN_LAYER_RECURRENT && instance->chunks != NULL &&
        layer->batch_invariant < 2) {
        prepared->chunk_bytes = instance->chunks->chunk_bytes(&instance->device, layer);
    }
    const bool planned = is_sparse ? instance->latent != NULL && lists_of(layer) == NULL
                                   : layer->kind == ATTN_LAYER_MLA;
    const bool both = ext_of(layer->next, ATTN_EXT_DRAFT_BOTH_CACHES) != NULL;
    prepared->way = prepared->chunk_bytes > 0 ? GPU_WAY_CHUNKS
                    : both                    ? GPU_WAY_BOTH_CACHES
                    : planned                 ? GPU_WAY_LATENT
                    : is_sparse || layer->kind == ATTN_LAYER_RECURRENT || instance->matrix == NULL
                        ? GPU_WAY_WITHOUT_PLAN
                        : GPU_WAY_ATTEND;
    prepared->topk = mla != NULL ? mla->topk : 0;
    prepared->num_kv_heads = layer->num_kv_heads;
    prepared->group = layer->num_q_heads / layer->num_kv_heads;
    prepared->padded_size = prepared->way == GPU_WAY_LATENT ? LATENT_MAX_RANK
                            : size <= 64                    ? 64
                            : size <= 128                   ? 128
                            : size <= 256                   ? 256
                                                            : PADDED_SIZE_MAX;
    prepared->invariant = layer->batch_invariant;
    /* Kernels for scales of rows share a reference of their tile's values; those of e4m3 queries
     * round probabilities to 16 bits or less. */
    prepared->plain = (layer->batch_invariant >= 2 && layer->kv_dtype > ATTN_KV_FP8_E5M2) ||
                      (layer->encoder == ATTN_ENCODER_MULTIMODAL && layer->dtype == ATTN_DTYPE_F32);
    prepared->narrow = layer->kv_dtype >= ATTN_KV_FP8_E4M3;
    prepared->packed = layer->kv_dtype == ATTN_KV_INT4_PER_TOKEN_HEAD ||
                       layer->kv_dtype == ATTN_KV_NVFP4 ||
                       turboquant_bits(layer->kv_dtype, true) > 0;
    prepared->dense =
        layer->kv_dtype == ATTN_KV_NVFP4 || turboquant_bits(layer->kv_dtype, false) > 0;
    gpu_prepare_lists(args, prepared);
    const struct gpu_prefill *prefill = instance->prefill;
    if (prefill != NULL && prepared->way == GPU_WAY_ATTEND && prepared->listed == 0) {
        prepared->copy_bytes =
            prefill->copy_bytes != NULL ? prefill->copy_bytes(layer, args->k_cache) : 0;
        prepared->prefills = prefill->may_serve == NULL || prefill->may_serve(args, prepared);
    }
    const bool own_few = prefill != NULL && prepared->group <= prefill->few_rows &&
                         prepared->padded_size <= 256 && !prepared->invariant;
    prepared->few_rows = prepared->copy_bytes > 0 ? GPU_FEW_COPIED_ROWS
                         : own_few                ? prefill->few_rows
                                                  : GPU_FEW_ROWS;
    if (layer->q_scale_form != ATTN_SCALE_NONE && layer->dtype != ATTN_DTYPE_F32) {
        prepared->query_bytes = layer->num_q_heads * layer->head_size * 2;
    }
    if (layer->output_form != ATTN_OUTPUT_PLAIN && prepared->way == GPU_WAY_ATTEND) {
        int32_t element = layer->dtype == ATTN_DTYPE_F32 ? 4 : 2;
        prepared->out_bytes = (int64_t)layer->num_q_heads * layer->head_size_v * element;
    }
}

attn_status gpu_prepare(const struct attn_prepare_args *args, attn_prepared **prepared,
                        struct attn_error *error)
{
    const struct attn_host *host = args->instance->host;
    struct attn_prepared *made = host->allocate(host->user, sizeof *made, 64);
    *prepared = NULL;
    if (made == NULL) {
        return plugin_error(error, ATTN_ERROR_OUT_OF_MEMORY, "prepared", "%zu bytes", sizeof *made);
    }
    const char *cause = NULL;
    *made = (struct attn_prepared){0};
    if (args->layer->kind == ATTN_LAYER_INDEXER) {
        gpu_prepare_index(args->layer, made);
    } else if (args->layer->kind == ATTN_LAYER_DRAFT_COMPRESSOR) {
        made->way = GPU_WAY_WITHOUT_PLAN;
    } else {
        prepare_layer(args, made);
    }
    if (made->way == GPU_WAY_BOTH_CACHES) {
        const struct gpu_latent_kernel *latent = args->instance->latent;
        cause = latent->takes_both(args->k_cache);
        cause = cause != NULL ? cause : latent->takes_both(args->caches->view);
    }
    if (cause != NULL) {
        gpu_release(args->instance, made);
        return plugin_error(error, ATTN_ERROR_UNSUPPORTED, "caches", "%s", cause);
    }
    if (gpu_vendor.load_kernels != NULL) {
        cause = gpu_vendor.load_kernels(args->instance, args->layer, made);
    }
    if (cause != NULL) {
        gpu_release(args->instance, made);
        return plugin_error(error, ATTN_ERROR_DEVICE, "layer", "its kernels do not load: %s",
                            cause);
    }
    *prepared = made;
    return ATTN_OK;
}

void gpu_release(attn_instance *instance, attn_prepared *prepared)
{
    if (prepared != NULL) {
        instance->host->release(instance->host->user, prepared, sizeof *prepared);
    }
}

int32_t gpu_latent_rows(int32_t most, int32_t group)
{
    int32_t rows = group < most ? group : most;
    while (group % rows != 0) {
        rows--;
    }
    return rows;
}

/* Rows of an item over latent rows, for either kernel. */
static int32_t least_rows(const struct attn_instance *instance,
                          const struct attn_prepared *prepared)
{
    int32_t rows = instance->latent != NULL
                       ? gpu_latent_rows(instance->latent->rows, prepared->group)
                       : LATENT_ROWS;
    return rows < LATENT_ROWS ? rows : LATENT_ROWS;
}

attn_status gpu_schedule_size(const struct attn_schedule_size_args *args,
                              struct attn_schedule_size *size, struct attn_error *error)
{
    attn_instance *instance = args->instance;
    const attn_prepared *prepared = args->prepared;
    const struct attn_limits *limits = args->limits;
    size->host_bytes = sizeof(struct schedule_host);
    size->device_bytes = size->scratch_bytes = 0;
    if (prepared->way == GPU_WAY_WITHOUT_PLAN || prepared->way == GPU_WAY_BOTH_CACHES) {
        size->scratch_bytes = gpu_list_bytes(prepared, limits->max_num_tokens);
        return ATTN_OK;
    }
    if (prepared->way == GPU_WAY_INDEX) {
        size->scratch_bytes = gpu_round_up(gpu_index_scratch(prepared, limits));
        return ATTN_OK;
    }
    if (prepared->way == GPU_WAY_CHUNKS) {
        bool chunks =
            limits->max_query_len == 0 || limits->max_query_len >= instance->chunks->tokens;
        int64_t most = instance->chunks->num_chunks(limits->max_num_reqs, limits->max_num_tokens);
        size->scratch_bytes = chunks ? gpu_round_up((size_t)(most * prepared->chunk_bytes)) : 0;
        return ATTN_OK;
    }
    int64_t least = prepared->way == GPU_WAY_LATENT ? least_rows(instance, prepared) : 16;
    int64_t rows = limits->max_num_tokens;
    int64_t reqs = prepared->listed > 0 ? rows : limits->max_num_reqs;
    int64_t row_tiles = (rows * prepared->group + least - 1) / least + reqs;
    struct layout by_item = layout_of(instance, prepared, reqs, row_tiles, rows, true);
    struct layout stream = layout_of(instance, prepared, reqs, row_tiles, rows, false);
    if (prepared->invariant || prepared->way == GPU_WAY_LATENT) {
        stream = by_item;
    }
    size->device_bytes = by_item.end > stream.end ? by_item.end : stream.end;
    size->scratch_bytes =
        by_item.scratch_end > stream.scratch_end ? by_item.scratch_end : stream.scratch_end;
    size->scratch_bytes += gpu_list_bytes(prepared, rows);
    if (prepared->prefills) {
        size_t workspace, scratch;
        instance->prefill->bytes(instance, prepared, limits, &workspace, &scratch);
        size->device_bytes += workspace;
        size->scratch_bytes += scratch;
    }
    return ATTN_OK;
}

static void set_layer(struct gpu_problem *p, const struct attn_layer_desc *layer,
                      const struct attn_layer_params *params)
{
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
    p->sinks = layer->has_sinks ? params->sinks : NULL;
    p->slopes = layer->alibi != ATTN_ALIBI_NONE ? params->alibi_slopes : NULL;
}

void set_problem(struct gpu_problem *p, const struct attn_attend_args *args)
{
    const struct attn_batch *batch = args->batch;
    const struct attn_layer_desc *layer = args->layer;
    set_layer(p, layer, args->params);
    p->num_reqs = batch->num_reqs;
    p->causal =
        (batch->causal != ATTN_CAUSAL_DEFAULT ? batch->causal : layer->causal) == ATTN_CAUSAL_YES;
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

void set_schedule(struct gpu_schedule *s, const struct attn_attend_args *args)
{
    const struct schedule_host *plan = args->schedule_host;
    const struct attn_prepared *prepared = args->prepared;
    bool latent = prepared->way == GPU_WAY_LATENT;
    const struct gpu_matrix_kernels *matrix = args->instance->matrix;
    const struct layout at = layout_of_plan(args);
    place_schedule(s, &at, args->workspace);
    s->tile_rows = plan->tile_rows;
    s->by_item = plan->by_item;
    s->concurrent = prepared->group % plan->tile_rows == 0 ? prepared->group / plan->tile_rows : 1;
    s->least_share = prepared->topk > 0 ? LEAST_SHARE_OF_LISTS
                     : plan->fast_few   ? LEAST_SHARE_OF_FEW
                                        : LEAST_SHARE;
    s->invariant = prepared->invariant;
    s->ctas = (args->instance->device.num_sms - plan->prefill_sms) *
              (latent ? 1 : matrix->groups_of_sm(args));
    /* keys of other steps without a cache have the activations' dtype */
    bool as_cached = args->k_cache != NULL || args->layer->encoder == ATTN_ENCODER_MULTIMODAL;
    s->tile = latent ? GPU_TILE : matrix->tile(prepared, as_cached, plan->tile_rows);
    s->max_segments = plan->tile_rows == 16 || plan->by_item ? s->max_segments : s->ctas;
    s->most_rows = plan->has_many ? plan->few_rows : 0;
    s->parts = (float *)(void *)((char *)args->scratch + at.parts);
}

static void choose_rows(struct schedule_host *plan, const struct attn_attend_args *args)
{
    plan->fast_few = 0;
    if (args->prepared->way == GPU_WAY_LATENT) {
        const struct gpu_latent_kernel *fast = args->instance->latent;
        bool served = fast != NULL && fast->serves(args);
        plan->fast = served;
        plan->by_item = served && !args->prepared->invariant ? 2 : 1;
        plan->tile_rows = LATENT_ROWS;
        if (served) {
            fast->choose_rows(args, plan);
        }
    } else {
        args->instance->matrix->choose_rows(args->prepared, args->batch, plan);
        if (args->prepared->listed > 0) { /* each token is a decode */
            plan->by_item = args->prepared->invariant != 0;
            plan->tile_rows = 16;
        }
    }
}

/* Which requests use the plugin's prefill. A graph may be replayed with other lengths, and a
 * request may have fewer rows than the host knows; then both kernels are launched. In a
 * batch-invariant layer a request's own rows decide, not what pays for the batch; with a prefix
 * cache too all requests use one of both, decodes as well. */
static void choose_ways(struct schedule_host *plan, const struct attn_attend_args *args,
                        int32_t mode)
{
    const struct gpu_prefill *prefill = args->instance->prefill;
    const struct attn_batch *batch = args->batch;
    int32_t group = args->prepared->group;
    const int32_t *start = batch->query_start_loc_host;
    plan->few_rows = args->prepared->invariant < 2 ? args->prepared->few_rows : 0;
    const bool known = mode == ATTN_PLAN_EAGER && !(batch->flags & ATTN_BATCH_HOST_BOUNDS);
    const int64_t items = (int64_t)batch->num_reqs * args->prepared->num_kv_heads;
    if (plan->few_rows > 0 && plan->few_rows < GPU_FEW_ROWS &&
        (known ? (int64_t)batch->num_reqs * batch->max_seq_len <= FEW_KEYS
               : 2 * items < args->instance->device.num_sms)) { /* items are not cut then */
        plan->few_rows = GPU_FEW_ROWS;
    }
    plan->has_few = 1;
    plan->has_many = args->prepared->prefills &&
                     (int64_t)batch->max_query_len * group > plan->few_rows &&
                     (prefill->serves == NULL || prefill->serves(args));
    if (!plan->has_many) {
        return;
    }
    plan->has_few = plan->few_rows > 0;
    plan->by_item = args->prepared->invariant || plan->few_rows > GPU_FEW_ROWS;
    plan->tile_rows = 16;
    if (mode != ATTN_PLAN_EAGER || batch->flags & ATTN_BATCH_HOST_BOUNDS) {
        return;
    }
    bool few = false, many = false, some = false; /* some requests have more rows than a decode */
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        int64_t rows = (int64_t)(start[r + 1] - start[r]) * group;
        few |= rows > 0 && rows <= plan->few_rows;
        many |= rows > plan->few_rows;
        some |= rows > GPU_FEW_ROWS && rows <= plan->few_rows;
    }
    plan->has_many = args->prepared->invariant ? many : prefill->pays(args);
    plan->has_few = few || !plan->has_many;
    plan->by_item = args->prepared->invariant || some ||
                    (!plan->has_many && (int64_t)batch->max_query_len * group > GPU_FEW_ROWS);
    plan->prefill_sms = plan->has_many && few && prefill->share != NULL ? prefill->share(args) : 0;
    plan->part_tiles = plan->has_many && !few && prefill->cut != NULL ? prefill->cut(args) : 0;
}

/* The same for gated delta in chunks. */
static void choose_chunks(struct schedule_host *plan, const struct attn_attend_args *args,
                          int32_t mode)
{
    const struct attn_batch *batch = args->batch;
    const int32_t *start = batch->query_start_loc_host;
    const int32_t tokens = args->instance->chunks->tokens;
    const struct attn_recurrent_desc *desc = ext_of(args->layer->next, ATTN_EXT_RECURRENT_DESC);
    const int32_t drafted = desc->num_speculative_tokens;
    const int32_t most = drafted < args->instance->chunks->ring_tokens ? 1 + drafted : 1;
    plan->has_steps = 1;
    plan->has_drafts = batch->max_query_len > 1 && most > 1;
    plan->has_few = batch->max_query_len > most;
    plan->has_many = batch->max_query_len >= tokens;
    if (batch->max_query_len <= 1 || mode != ATTN_PLAN_EAGER ||
        batch->flags & ATTN_BATCH_HOST_BOUNDS) {
        return;
    }
    bool few = false, drafts = false, steps = false;
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        int32_t count = start[r + 1] - start[r];
        steps |= count == 1;
        drafts |= count > 1 && count <= most;
        few |= count > most && count < tokens;
    }
    plan->has_steps = steps;
    plan->has_drafts = drafts;
    plan->has_few = few;
}

char *prefill_memory(const struct attn_attend_args *args)
{
    return (char *)args->workspace + layout_of_plan(args).end;
}

char *prefill_scratch(const struct attn_attend_args *args, int64_t *bytes)
{
    size_t at = layout_of_plan(args).scratch_end;
    *bytes = (int64_t)args->scratch_bytes - (int64_t)at;
    return (char *)args->scratch + at;
}

attn_status gpu_make_schedule(const struct attn_attend_args *args, int32_t mode,
                              struct attn_error *error)
{
    struct schedule_host *plan = args->schedule_host;
    const struct attn_batch *batch = args->batch;
    struct gpu_plan_params p = {0};
    if (args->prepared != NULL && (args->prepared->way == GPU_WAY_WITHOUT_PLAN ||
                                   args->prepared->way == GPU_WAY_BOTH_CACHES)) {
        return ATTN_OK;
    }
    if (plan == NULL || args->prepared == NULL ||
        (args->workspace == NULL && args->prepared->way != GPU_WAY_CHUNKS &&
         args->prepared->way != GPU_WAY_INDEX)) {
        return plugin_error(error, ATTN_ERROR_WORKSPACE, "workspace",
                            "a schedule needs what prepare made, host memory and workspace");
    }
    if (args->prepared->way == GPU_WAY_INDEX) {
        if (mode != ATTN_PLAN_REPLAY && mode != ATTN_PLAN_IN_GRAPH) {
            plan->max_seq_len =
                mode == ATTN_PLAN_EAGER ? batch->max_seq_len : args->limits->max_seq_len;
        }
        return ATTN_OK;
    }
    if (args->prepared->way == GPU_WAY_CHUNKS) {
        if (mode != ATTN_PLAN_REPLAY && mode != ATTN_PLAN_IN_GRAPH) {
            choose_chunks(plan, args, mode);
        }
        return ATTN_OK;
    }
    if (mode != ATTN_PLAN_REPLAY && mode != ATTN_PLAN_IN_GRAPH) {
        plan->prefill_sms = plan->part_tiles = 0;
        choose_rows(plan, args);
        choose_ways(plan, args, mode);
        plan->num_tokens = batch->num_tokens;
        plan->num_queries = batch->num_reqs > 0 ? batch->query_start_loc_host[batch->num_reqs] -
                                                      batch->query_start_loc_host[0]
                                                : 0;
        const bool listed = args->prepared->listed > 0;
        plan->request_rows = (listed ? 1 : batch->max_query_len) * args->prepared->group;
        plan->num_reqs = listed ? batch->num_tokens : batch->num_reqs;
        plan->num_rows = batch->num_actual_tokens;
        plan->num_row_tiles =
            ((int64_t)batch->num_tokens * args->prepared->group + plan->tile_rows - 1) /
                plan->tile_rows +
            plan->num_reqs;
        if (plan->has_many && !args->instance->prefill->fits(args, mode)) {
            plan->has_many = 0;
            plan->has_few = 1;
            plan->by_item = 1;
            plan->prefill_sms = plan->part_tiles = 0;
        }
    }
    if (mode == ATTN_PLAN_OUT_OF_GRAPH || batch->num_reqs == 0) {
        return ATTN_OK;
    }
    const char *cause = NULL;
    set_problem(&p.problem, args);
    p.problem.topk = args->prepared->topk;
    gpu_count_lists(args, &p.problem);
    if (plan->has_many) {
        cause = args->instance->prefill->plan(args, &p.problem, prefill_memory(args));
    }
    if (cause == NULL && plan->has_few) {
        set_schedule(&p.schedule, args);
        cause = gpu_device_launch(&args->instance->device, GPU_KERNEL_plan, 1, &p, args->stream);
    }
    return device_status(cause, "plan", error);
}

/* The schedule depends on lengths only; block tables are read when a step runs. */
attn_status gpu_update_block_table(const struct attn_attend_args *args, struct attn_error *error)
{
    return ATTN_OK;
}
