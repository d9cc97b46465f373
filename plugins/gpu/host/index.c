/* SPDX-License-Identifier: Apache-2.0 */
/* Indexers (attn/indexer.h): the write of their keys; scores of a chunk of tokens, which stay in
 * the scratch, then their lists. */
#include <attn/draft/index_write.h>
#include <attn/indexer.h>

#include "gpu/host/schedule.h"
#include "gpu/index.h"

#define SCORE_BYTES ((int64_t)256 << 20) /* a chunk's, unless one token has more */

static const struct attn_indexer_desc *indexer_of(const struct attn_layer_desc *layer)
{
    return ext_of(layer->next, ATTN_EXT_INDEXER_DESC);
}

/* Floats of a list's scores. */
static int64_t score_stride(const struct attn_prepared *prepared, const struct attn_limits *limits)
{
    const int64_t rows = limits->max_seq_len / prepared->tokens_per_row;
    return (rows + INDEX_ROWS - 1) / INDEX_ROWS * INDEX_ROWS;
}

/* Tokens of a chunk. */
static int64_t chunk_tokens(const struct attn_prepared *prepared, const struct attn_limits *limits)
{
    const int64_t bytes = score_stride(prepared, limits) * prepared->lists * 4;
    const int64_t tokens = bytes > 0 ? SCORE_BYTES / bytes : limits->max_num_tokens;
    return tokens < 1 ? 1 : tokens < limits->max_num_tokens ? tokens : limits->max_num_tokens;
}

static void set_norm(const struct attn_tensor *tensor, const void **data, int32_t *dtype)
{
    if (tensor != NULL) {
        *data = (const char *)tensor->data + tensor->byte_offset;
        *dtype = number_dtype_name(tensor->dtype);
    }
}

attn_status gpu_write_index(const struct attn_write_kv_args *args, struct attn_error *error)
{
    const struct attn_index_write *write = ext_of(args->layer->next, ATTN_EXT_DRAFT_INDEX_WRITE);
    const struct attn_io_index_write *io = ext_of(args->next, ATTN_EXT_DRAFT_IO_INDEX_WRITE);
    struct gpu_index_write_params p = {
        .from = gpu_tensor_of(args->k),
        .to = gpu_cache_of(args->layer, args->params, args->k_cache, false),
        .slots = args->slot_mapping,
        .num_slots = args->num_slots,
        .tokens_per_row = indexer_of(args->layer)->tokens_per_row,
        .block_size = args->k_cache->block_size,
    };
    if (write != NULL) {
        p.layer_norm = write->norm == ATTN_KEY_NORM_LAYER;
        p.rotary_dim = write->rotary_dim;
        p.rotary_first = write->rotary_first;
        p.neox = write->rope == ATTN_ROPE_NEOX;
        p.hadamard = write->hadamard;
        p.norm_eps = io->norm_eps;
        p.positions = io->positions;
        set_norm(io->norm_weight, &p.weight, &p.weight_dtype);
        set_norm(io->norm_bias, &p.bias, &p.bias_dtype);
        if (write->rotary_dim > 0) {
            p.cos_sin = gpu_tensor_of(io->cos_sin);
        }
    }
    return gpu_run(
        args->instance, GPU_KERNEL_index_write, p.num_slots,
        gpu_warp_groups(&args->instance->device, GPU_THREADS_index_write, p.num_slots, 32), &p,
        args->stream, "write_kv", error);
}

void gpu_prepare_index(const struct attn_layer_desc *layer, struct attn_prepared *prepared)
{
    const struct attn_indexer_desc *x = indexer_of(layer);
    prepared->way = GPU_WAY_INDEX;
    prepared->tokens_per_row = x->tokens_per_row;
    prepared->lists = x->num_groups;
}

/* Bytes of the chunk's scores. */
static size_t score_bytes(const struct attn_prepared *prepared, const struct attn_limits *limits)
{
    return (size_t)(chunk_tokens(prepared, limits) * score_stride(prepared, limits) *
                    prepared->lists * 4);
}

/* The scores, then the counters and entries of groups that share lists (arrived, kept_count, kept).
 */
size_t gpu_index_scratch(const struct attn_prepared *prepared, const struct attn_limits *limits)
{
    const int64_t most = chunk_tokens(prepared, limits) * prepared->lists * INDEX_PARTS;
    const int64_t groups = most < INDEX_GROUPS ? most : INDEX_GROUPS;
    const bool shares = score_stride(prepared, limits) / 2 >= INDEX_PART_ROWS;
    return score_bytes(prepared, limits) +
           (size_t)(shares ? (INDEX_GROUPS + groups * INDEX_KEPT) * 8 : 0);
}

/* Groups of each of `lists` long lists. */
static int32_t count_parts(const struct gpu_device *device, const struct gpu_index_params *p,
                           int64_t lists)
{
    const int64_t groups = device->num_sms < INDEX_GROUPS ? device->num_sms : INDEX_GROUPS;
    int64_t parts = groups / lists;
    parts = parts < p->max_rows / INDEX_PART_ROWS ? parts : p->max_rows / INDEX_PART_ROWS;
    parts = parts < INDEX_PARTS ? parts : INDEX_PARTS;
    return p->rows_per_entry > 1 || parts < 1 ? 1 : (int32_t)parts;
}

static struct gpu_index_params params_of(const struct attn_attend_args *args)
{
    const struct attn_indexer_desc *x = indexer_of(args->layer);
    const struct attn_io_indexer *io = ext_of(args->next, ATTN_EXT_IO_INDEXER);
    const struct schedule_host *plan = args->schedule_host;
    const struct attn_batch *batch = args->batch;
    const int64_t bytes = args->out->dtype.bits / 8;
    const size_t scores = score_bytes(args->prepared, args->limits);
    struct gpu_params scale = {0};
    set_query_scale(&scale, args);
    struct gpu_index_params p = {
        .q = gpu_tensor_of(args->q),
        .k = gpu_cache_of(args->layer, args->params, args->k_cache, false),
        .query_start = batch->query_start_loc,
        .seq_lens = batch->seq_lens,
        .block_table = batch->block_table,
        .block_table_row = batch->block_table_row,
        .block_table_stride = batch->block_table_stride,
        .q_scale = scale.q_scale,
        .scale = args->layer->scale,
        .q_scale_host = scale.q_scale_host,
        .num_reqs = batch->num_reqs,
        .heads = args->layer->num_q_heads,
        .groups = x->num_groups,
        .relu = x->activation == ATTN_INDEXER_RELU,
        .tokens_per_row = x->tokens_per_row,
        .block_rows = args->k_cache->block_size,
        .max_rows = plan->max_seq_len / x->tokens_per_row,
        .topk = x->topk,
        .rows_per_entry = x->rows_per_entry,
        .rows_per_score = 1,
        .first_entries = x->first_entries,
        .last_entries = x->last_entries,
        .tail = x->tail,
        .forced_on_top = x->forced_on_top,
        .scores = args->scratch,
        .score_stride = score_stride(args->prepared, args->limits),
        .out = (int32_t *)(void *)((char *)args->out->data + args->out->byte_offset),
        .lengths = io != NULL ? io->lengths : NULL,
        .out_token = tensor_stride(args->out, 0) * bytes / 4,
        .out_group = tensor_stride(args->out, 1) * bytes / 4,
        .room = (int32_t)args->out->shape[2],
        .parts = 1,
        .arrived = (int32_t *)(void *)((char *)args->scratch + scores),
    };
    p.kept_count = p.arrived + INDEX_GROUPS;
    p.kept = p.kept_count + INDEX_GROUPS;
    if (x->has_weights) {
        p.weights = gpu_tensor_of(io->weights);
        p.weights.head = tensor_stride(io->weights, 1) * (io->weights->dtype.bits / 8);
    }
    return p;
}

attn_status gpu_index(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct gpu_device *device = &args->instance->device;
    const struct gpu_index_scores *fast = args->instance->index_scores;
    const int32_t tokens = args->batch->num_actual_tokens;
    const char *cause = NULL;
    if (args->batch->num_reqs <= 0 || tokens <= 0) {
        return ATTN_OK;
    }
    struct gpu_index_params p = params_of(args);
    if (args->scratch == NULL ||
        gpu_index_scratch(args->prepared, args->limits) > args->scratch_bytes) {
        return plugin_error(error, ATTN_ERROR_WORKSPACE, "scratch", "%zu bytes; %zu are needed",
                            args->scratch != NULL ? args->scratch_bytes : 0,
                            gpu_index_scratch(args->prepared, args->limits));
    }
    const int32_t chunk = (int32_t)chunk_tokens(args->prepared, args->limits);
    const bool is_fast = fast != NULL && fast->takes(&p);
    if (is_fast && p.rows_per_entry % INDEX_POOL == 0) {
        p.rows_per_score = INDEX_POOL;
    }
    const bool is_short = p.max_rows <= (int64_t)INDEX_SHORT * p.rows_per_entry &&
                          p.rows_per_entry <= INDEX_SHORT_SCORES * p.rows_per_score;
    for (; p.first_token < tokens && cause == NULL; p.first_token += chunk) {
        p.num_tokens = tokens - p.first_token < chunk ? tokens - p.first_token : chunk;
        const int64_t lists = (int64_t)p.num_tokens * p.groups;
        p.parts = is_short ? 1 : count_parts(device, &p, lists);
        if (p.max_rows > 0) {
            const int64_t tiles = (p.max_rows + INDEX_ROWS - 1) / INDEX_ROWS;
            cause =
                is_fast
                    ? fast->run(device, &p, args->stream)
                    : gpu_device_launch(device, GPU_KERNEL_index_scores,
                                        gpu_groups(lists * tiles, 1, (int64_t)device->num_sms * 8),
                                        &p, args->stream);
        }
        if (cause != NULL) {
            break;
        }
        cause = gpu_device_launch(device,
                                  is_short ? GPU_KERNEL_index_top_k_short : GPU_KERNEL_index_top_k,
                                  gpu_groups(lists * p.parts, 1, 1 << 20), &p, args->stream);
    }
    return device_status(cause, "attend", error);
}
