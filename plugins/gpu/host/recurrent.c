/* SPDX-License-Identifier: Apache-2.0 */
/* recurrent: turns the call's parts into kernel parameters; windows roll after the rule.
 * Slots and counts lie on the device and are checked there: what is out of range is ignored. */
#include "common/recurrent.h"

#include "gpu/delta.h"
#include "gpu/host/schedule.h"

#define STEP_TOKENS 4 /* mean tokens of a request up to which delta_step is used */

static struct gpu_matrix matrix_of(const struct attn_tensor *tensor)
{
    if (tensor == NULL) {
        return (struct gpu_matrix){NULL, 0, 0, 0};
    }
    int32_t last = tensor->ndim - 1;
    return (struct gpu_matrix){(const char *)tensor->data + tensor->byte_offset,
                               last > 0 ? tensor_stride(tensor, 0) : 0, tensor_stride(tensor, last),
                               number_dtype_name(tensor->dtype)};
}

static struct gpu_delta_params params_of(const struct gdn *gdn)
{
    const struct attn_attend_args *args = gdn->args;
    const struct attn_recurrent_desc *desc = gdn->desc;
    const struct attn_batch_recurrent *states = gdn->states;
    struct gpu_delta_params p = {
        .out = gpu_tensor_of(args->out),
        .a = matrix_of(gdn->io->a),
        .b = matrix_of(gdn->io->b),
        .a_log = gdn->weights->a_log,
        .dt_bias = gdn->weights->dt_bias,
        .query_start = args->batch->query_start_loc,
        .seq_lens = args->batch->seq_lens,
        .state_slots = states->state_slots,
        .num_accepted = states->num_accepted_tokens,
        .has_state = states->has_initial_state,
        .initial_slots = states->initial_slots,
        .initial_slots_stride = states->initial_slots_stride > 0 ? states->initial_slots_stride : 1,
        .checkpoint_slots = states->checkpoint_slots,
        .checkpoint_slots_stride = states->checkpoint_slots_stride,
        .checkpoint_interval = states->checkpoint_slots != NULL ? desc->checkpoint_interval : 0,
        .state_slots_stride = states->state_slots_stride > 0 ? states->state_slots_stride : 1,
        .num_slots = args->k_cache->num_blocks,
        .state = args->k_cache->data,
        .state_slot = args->k_cache->stride_block,
        .state_head = args->k_cache->stride_head,
        .window_dtype = args->layer->dtype,
        .num_reqs = args->batch->num_reqs,
        .num_tokens = args->batch->num_actual_tokens,
        .num_k_heads = desc->num_k_heads,
        .num_v_heads = desc->num_v_heads,
        .head_size_k = desc->head_size_k,
        .head_size_v = desc->head_size_v,
        .conv_width = desc->conv_width,
        .conv_silu = desc->conv_silu,
        .l2norm = desc->qk_l2norm,
        .num_drafted = desc->num_speculative_tokens,
        .row_tiles = (desc->head_size_v + DELTA_ROWS - 1) / DELTA_ROWS,
        .invariant = args->layer->batch_invariant > 0,
        .scale = args->layer->scale,
        .first_q = (int32_t)gdn->first_q,
        .first_k = (int32_t)gdn->first_k,
        .first_v = (int32_t)gdn->first_v,
        .rule = {.skip = gdn->skip,
                 .additive = gdn->rule->rule == ATTN_RULE_ADDITIVE,
                 .gate = gdn->rule->gate,
                 .write_gate = gdn->rule->write_gate,
                 .gates = gdn->rule->gate_per_channel ? desc->head_size_k : 1,
                 .state_dtype = desc->state_dtype,
                 .gate_bound = gdn->rule->gate_bound,
                 .dt_min = gdn->rule->dt_min,
                 .dt_max = gdn->rule->dt_max},
    };
    if (gdn->rounding != NULL) {
        p.rule.seed[0] = (uint32_t)gdn->rounding->seed;
        p.rule.seed[1] = (uint32_t)(gdn->rounding->seed >> 32);
        p.rule.rounds = gdn->rounding->philox_rounds;
    }
    if (desc->conv_width > 0) {
        p.mixed = gpu_tensor_of(gdn->io->mixed_qkv);
        p.conv_weight = matrix_of(gdn->weights->conv_weight);
        p.conv_bias = matrix_of(gdn->weights->conv_bias);
    } else {
        p.q = gpu_tensor_of(args->q);
        p.k = gpu_tensor_of(args->k);
        p.v = gpu_tensor_of(args->v);
    }
    if (desc->conv_width > 1) {
        p.window = args->v_cache->data;
        p.window_slot = args->v_cache->stride_block;
        p.window_channel = args->v_cache->stride_head;
    }
    return p;
}

/* The kernels that a call needs: for requests of one token, of few tokens, and in chunks. The first
 * and the last are a plugin's own; without them all requests count as few, as do requests whose
 * checkpoints those two cannot write (device/delta.h). */
struct ways {
    bool steps, few, chunks;
};

/* Drafts that keep all of their states count as few whatever their number, which the plan does not
 * know. */
static attn_status choose_ways(const struct attn_attend_args *args, struct gpu_delta_params *p,
                               const struct gpu_ring_params *ring, struct ways *ways,
                               struct attn_error *error)
{
    const struct attn_instance *instance = args->instance;
    const struct gpu_delta_chunks *own = instance->chunks;
    const struct schedule_host *plan = args->schedule_host;
    *ways = (struct ways){.few = true};
    if (args->prepared == NULL || args->prepared->way != GPU_WAY_CHUNKS || plan == NULL) {
        return ATTN_OK;
    }
    if (ring == NULL) {
        p->steps_apart = p->num_accepted == NULL && own->takes_steps(&instance->device, p);
    } else if (own->takes_rings(&instance->device, ring)) {
        const bool drafts = p->num_accepted != NULL && p->num_drafted < own->ring_tokens;
        p->steps_apart = drafts ? own->ring_tokens : 1;
    } else {
        return ATTN_OK;
    }
    const bool drafts_apart = p->steps_apart > 1;
    p->chunked_from = plan->has_many && own->takes(p) ? own->tokens : 0;
    ways->steps = (p->steps_apart && plan->has_steps) || (drafts_apart && plan->has_drafts);
    ways->chunks = p->chunked_from > 0;
    p->chunks_roll = ways->chunks && own->rolls(&instance->device);
    ways->few = plan->has_few || (p->checkpoint_interval > 0 && (ring != NULL || plan->has_many)) ||
                (plan->has_steps && !p->steps_apart) || (plan->has_drafts && !drafts_apart) ||
                (plan->has_many && (!ways->chunks || p->num_drafted >= own->tokens));
    int64_t chunks = own->num_chunks(p->num_reqs, p->num_tokens);
    if (ways->chunks && (args->scratch == NULL ||
                         (uint64_t)(chunks * args->prepared->chunk_bytes) > args->scratch_bytes)) {
        return plugin_error(error, ATTN_ERROR_WORKSPACE, "scratch",
                            "%zu bytes; %lld chunks of %lld are needed",
                            args->scratch != NULL ? args->scratch_bytes : 0, (long long)chunks,
                            (long long)args->prepared->chunk_bytes);
    }
    return ATTN_OK;
}

/* Launches the kernels that go token by token. */
static const char *run_tokens(const struct gpu_device *device, struct gpu_delta_params *p,
                              const struct attn_layer_desc *layer, void *stream)
{
    const bool is_plain = gdn_is_plain(layer);
    /* Longer requests are bound by the latency of tokens, where more groups of fewer rows help.
     * Both kernels add in one order, so that a host's bits are the same. A device's compiler may
     * fuse products and sums in one kernel and not in the other, and the choice goes by the batch:
     * batch-invariant layers have one kernel. */
    bool is_step = is_plain && !p->invariant && p->head_size_k <= 128 &&
                   p->num_tokens <= STEP_TOKENS * p->num_reqs &&
                   (int64_t)p->num_reqs * p->num_v_heads >= 2 * (int64_t)device->num_sms;
    if (is_step) {
        p->row_tiles = (p->head_size_v + DELTA_STEP_ROWS - 1) / DELTA_STEP_ROWS;
    }
    int64_t items = (int64_t)p->num_reqs * p->num_v_heads * p->row_tiles;
    enum gpu_kernel kernel = is_step                 ? GPU_KERNEL_delta_step
                             : p->head_size_k <= 128 ? GPU_KERNEL_delta_128
                                                     : GPU_KERNEL_delta_512;
    if (!is_plain) {
        kernel = p->head_size_k <= 128 ? GPU_KERNEL_rule_128 : GPU_KERNEL_rule_512;
    }
    return gpu_device_launch(device, kernel, gpu_groups(items, 1, 1 << 20), p, stream);
}

static struct gpu_ring_params ring_of(const struct gdn *gdn, const struct gpu_delta_params *p)
{
    return (struct gpu_ring_params){.delta = *p,
                                    .ring = gdn->ring->data,
                                    .ring_slot = gdn->ring->stride_block,
                                    .ring_row = gdn->ring->stride_slot,
                                    .ring_head = gdn->ring->stride_head,
                                    .ring_tokens = gdn->ring_tokens,
                                    .rows = gdn->ring->block_size,
                                    .dtype = gdn->args->layer->dtype};
}

/* Launches a plugin's own kernel and then the one that goes token by token. */
static const char *run_rings(const struct attn_instance *instance, struct gpu_ring_params *ring,
                             const struct ways *ways, void *stream)
{
    const struct gpu_delta_params *p = &ring->delta;
    const char *cause = ways->steps || ways->chunks
                            ? instance->chunks->run_rings(&instance->device, ring, stream)
                            : NULL;
    if (cause != NULL || !ways->few) {
        return cause;
    }
    const int64_t items = (int64_t)p->num_reqs * p->num_v_heads * p->row_tiles;
    return gpu_device_launch(&instance->device,
                             p->head_size_k <= 128 ? GPU_KERNEL_ring_128 : GPU_KERNEL_ring_512,
                             gpu_groups(items, 1, 1 << 20), ring, stream);
}

static const char *run_norm(const struct gdn *gdn, const struct gpu_delta_params *p,
                            const struct gpu_device *device, void *stream)
{
    const struct gpu_delta_norm_params norm = {.delta = *p,
                                               .gate = gpu_tensor_of(gdn->output_gate),
                                               .weight = matrix_of(gdn->norm_weight),
                                               .per_head = gdn->norm->num_groups > 0,
                                               .num_heads = gdn_norm_size(gdn),
                                               .sigmoid = gdn->norm->gate_activation ==
                                                          ATTN_OUTPUT_GATE_SIGMOID,
                                               .gate_first = gdn->norm->gate_first,
                                               .epsilon = gdn->norm->epsilon};
    const int64_t items = p->num_tokens * (int64_t)(p->num_v_heads / norm.num_heads);
    return gpu_device_launch(device, GPU_KERNEL_delta_norm,
                             gpu_warp_groups(device, GPU_THREADS_delta_norm, items, 32), &norm,
                             stream);
}

attn_status gpu_recurrent(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct gdn gdn = gdn_of(args);
    if (args->batch->num_reqs <= 0) {
        return ATTN_OK;
    }
    const struct gpu_device *device = &args->instance->device;
    struct gpu_delta_params p = params_of(&gdn);
    const struct gpu_delta_chunks *own = args->instance->chunks;
    struct ways ways;
    struct gpu_ring_params ring;
    p.has_ring = gdn.ring != NULL;
    if (gdn.ring != NULL) {
        ring = ring_of(&gdn, &p);
    }
    attn_status status = choose_ways(args, &p, gdn.ring != NULL ? &ring : NULL, &ways, error);
    if (status != ATTN_OK) {
        return status;
    }
    const char *cause = NULL;
    if (gdn.ring != NULL) {
        ring.delta = p;
        cause = run_rings(args->instance, &ring, &ways, args->stream);
    } else {
        cause = ways.steps ? own->run_steps(device, &p, args->stream) : NULL;
        if (cause == NULL && ways.few) {
            cause = run_tokens(device, &p, args->layer, args->stream);
        }
    }
    if (cause == NULL && ways.chunks) {
        struct gpu_delta_params chunks = p;
        chunks.in_place = gdn.ring != NULL; /* run_rings has left them so */
        cause = own->run(device, &chunks, args->prepared->chunk_bytes, args->scratch, args->stream);
    }
    if (cause == NULL && p.conv_width > 1 &&
        (ways.few || (ways.chunks && (!p.chunks_roll || p.checkpoint_interval > 0)))) {
        cause = gpu_device_launch(
            device, GPU_KERNEL_delta_roll,
            gpu_groups(gdn.num_channels * p.num_reqs, GPU_THREADS_delta_roll, 1 << 20), &p,
            args->stream);
    }
    if (cause == NULL && gdn.norm != NULL) {
        cause = run_norm(&gdn, &p, device, args->stream);
    }
    return device_status(cause, "gated_delta", error);
}
