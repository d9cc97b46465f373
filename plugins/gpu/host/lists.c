/* SPDX-License-Identifier: Apache-2.0 */
/* Attends over lists of keys (attn/draft/index_lists.h): a kernel turns lists into units of
 * neighbouring slots, which the others read in place of the block table. */
#include <attn/draft/index_lists.h>

#include "gpu/host/schedule.h"
#include "gpu/lists.h"

/* Neighbouring keys of an entry whose slots are neighbours, too: a power of two. Where a window or
 * chunk may hide the first of them it is one. */
static int32_t unit_of(const struct attn_layer_desc *layer, const struct attn_kv_view *cache)
{
    const int32_t entry = lists_of(layer)->granularity;
    if (cache == NULL || layer->has_window || layer->chunk_size > 0) {
        return 1;
    }
    const int32_t block = cache->block_size & -cache->block_size;
    return block < entry ? block : entry;
}

void gpu_prepare_lists(const struct attn_prepare_args *args, struct attn_prepared *prepared)
{
    const struct attn_layer_desc *layer = args->layer;
    const struct attn_index_lists *lists = lists_of(layer);
    if (lists == NULL || layer_is_latent(layer)) {
        return;
    }
    prepared->lists = lists->groups == ATTN_LISTS_SHARED        ? 1
                      : lists->groups == ATTN_LISTS_PER_KV_HEAD ? layer->num_kv_heads
                                                                : layer->num_q_heads;
    prepared->listed = lists->max_entries * lists->granularity;
    prepared->unit_stride = prepared->listed / unit_of(layer, args->k_cache);
}

size_t gpu_list_bytes(const struct attn_prepared *prepared, int64_t tokens)
{
    const int64_t bytes = tokens * prepared->lists * (prepared->unit_stride + 1) * 4;
    return prepared->listed > 0 ? gpu_round_up((size_t)bytes) : 0;
}

void gpu_count_lists(const struct attn_attend_args *args, struct gpu_problem *p)
{
    p->listed = args->prepared->listed;
    p->lists = p->listed > 0 ? args->prepared->lists : 0;
    p->num_tokens = args->batch->num_actual_tokens;
}

struct gpu_list_entries gpu_entries_of(const struct attn_attend_args *args)
{
    const struct attn_index_lists *lists = lists_of(args->layer);
    const struct attn_io_index_lists *io = ext_of(args->next, ATTN_EXT_DRAFT_IO_INDEX_LISTS);
    return (struct gpu_list_entries){
        .entries = io->indices,
        .lengths = lists->has_lengths ? io->lengths : NULL,
        .entry_token = io->token_stride,
        .entry_list = io->group_stride,
        .length_token = io->length_stride,
        .max_entries = lists->max_entries,
        .granularity = lists->granularity,
    };
}

/* Whether the matrix kernels serve the whole batch and read its lists themselves. */
static bool reads_lists(const struct attn_attend_args *args, const struct gpu_params *p)
{
    const struct gpu_matrix_kernels *matrix = args->instance->matrix;
    const struct schedule_host *plan = args->schedule_host;
    if (matrix->reads_lists == NULL || args->prepared->plain || plan->has_many) {
        return false;
    }
    return matrix->reads_lists(args, p);
}

const char *gpu_make_lists(const struct attn_attend_args *args, char *memory, bool planned,
                           struct gpu_params *params)
{
    const struct attn_prepared *prepared = args->prepared;
    const struct gpu_device *device = &args->instance->device;
    struct gpu_problem *p = &params->problem;
    gpu_count_lists(args, p);
    const int64_t count = (int64_t)p->num_tokens * p->lists;
    const int64_t end =
        memory - (char *)args->scratch + (int64_t)gpu_list_bytes(prepared, p->num_tokens);
    if (end > (int64_t)args->scratch_bytes) {
        return "the scratch has no room for this batch's lists";
    }
    while (prepared->unit_stride << p->unit_shift < prepared->listed) {
        p->unit_shift++;
    }
    p->unit_stride = prepared->unit_stride;
    const struct gpu_list_params make = {
        .problem = *p,
        .from = gpu_entries_of(args),
        .units = (int32_t *)(void *)memory,
        .list_lengths = (int32_t *)(void *)memory + count * prepared->unit_stride,
    };
    p->causal = 0; /* units are those that a token sees */
    p->causal_per_request = NULL;
    p->window_left = p->window_right = -1;
    p->chunk_size = 0;
    if (planned && reads_lists(args, params)) {
        return NULL;
    }
    p->units = make.units;
    p->list_lengths = make.list_lengths;
    return gpu_device_launch(device, GPU_KERNEL_list_keys,
                             gpu_groups(count, 1, (int64_t)device->num_sms * 32), &make,
                             args->stream);
}

bool gpu_attend_lists(const struct attn_attend_args *args, const struct gpu_params *p,
                      const char **cause)
{
    /* other kernels' bits differ, so that in a batch-invariant layer a batch may not decide */
    if (args->instance->lists == NULL || args->prepared->invariant || args->k_cache == NULL ||
        args->layer->output_form != ATTN_OUTPUT_PLAIN) {
        return false;
    }
    struct gpu_list_attend attend = {
        .attend = *p,
        .from = gpu_entries_of(args),
        .blocks = args->k_cache->num_blocks,
    };
    gpu_count_lists(args, &attend.attend.problem);
    const struct schedule_host *plan = args->schedule_host;
    attend.tokens = args->prepared->way != GPU_WAY_WITHOUT_PLAN ? plan->num_queries
                                                                : attend.attend.problem.num_tokens;
    return args->instance->lists->attend(&args->instance->device, &attend, args->stream, cause);
}
