/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_ref under the name of recording, which counts how the core has rows written; as
 * recording_apart it does not say that its attends can write, as recording_narrow it takes blocks
 * of 4 and 8 slots alone and has neither chunks nor static sinks, as recording_codes its attends
 * write static fp8. */
#include "backend_recording.h"

#include <attn/plugin.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_ref_backend.h"
#include "support/client.h"

ATTN_EXPORT struct recorded recorded;

/* What it was prepared for. */
struct attn_prepared {
    struct attn_kv_view k, v;
    int32_t phase, has_k, has_v, num_caches;
};

static int32_t value_of(const struct attn_ext *next)
{
    const uint32_t id = recorded.extension != 0 ? recorded.extension : RECORDED_EXTENSION;
    while (next != NULL && next->id != id) {
        recorded.strange += next->id > ATTN_EXT_VENDOR;
        next = next->next;
    }
    return next != NULL ? ((const struct recorded_extension *)next)->value : 0;
}

static attn_status prepare(const struct attn_prepare_args *args, attn_prepared **prepared,
                           struct attn_error *error)
{
    *prepared = calloc(1, sizeof **prepared);
    if (*prepared == NULL) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    recorded.prepares++;
    recorded.prepared = value_of(args->layer->next);
    (*prepared)->phase = args->phase;
    (*prepared)->num_caches = args->num_caches;
    (*prepared)->has_k = args->k_cache != NULL;
    (*prepared)->has_v = args->v_cache != NULL;
    (*prepared)->k = args->k_cache != NULL ? *args->k_cache : (*prepared)->k;
    (*prepared)->v = args->v_cache != NULL ? *args->v_cache : (*prepared)->v;
    return ATTN_OK;
}

static void release(attn_instance *instance, attn_prepared *prepared)
{
    free(prepared);
}

static bool same_view(const struct attn_kv_view *view, int32_t there,
                      const struct attn_kv_view *prepared)
{
    return view == NULL ? !there : there && memcmp(view, prepared, sizeof *view) == 0;
}

/* An attend gets the caches that prepare got. */
static bool is_prepared(const struct attn_attend_args *args)
{
    const attn_prepared *s = args->prepared;
    return s->phase == args->phase && s->num_caches == args->num_caches &&
           same_view(args->k_cache, s->has_k, &s->k) && same_view(args->v_cache, s->has_v, &s->v);
}

/* What a plan keeps: the limits that it was made with. */
struct attn_plan_state {
    const struct attn_limits *limits;
};

static attn_status create_plan_state(const struct attn_schedule_size_args *args,
                                     attn_plan_state **state, struct attn_error *error)
{
    const bool fails = recorded.no_state > 0 && --recorded.no_state == 0;
    *state = fails ? NULL : malloc(sizeof **state);
    if (*state == NULL || args->plan_state != NULL) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    (*state)->limits = args->limits;
    recorded.states++;
    return ATTN_OK;
}

static void destroy_plan_state(attn_instance *instance, attn_plan_state *state)
{
    recorded.states -= instance != NULL;
    free(state);
}

/* Sizes that tell limits apart. */
static attn_status schedule_size(const struct attn_schedule_size_args *args,
                                 struct attn_schedule_size *size, struct attn_error *error)
{
    if (args->plan_state == NULL || args->plan_state->limits != args->limits) {
        return ATTN_ERROR_PLUGIN;
    }
    size->host_bytes = 64 + (size_t)args->limits->max_num_reqs;
    size->device_bytes = 1000 + (size_t)args->limits->max_num_tokens;
    return ATTN_OK;
}

/* The host's copies of a batch are copies, its bounds are bounds, its rows end where its last
 * request does, and it brings a tree only where the layer says so. */
static bool is_whole(const struct attn_batch *b, const struct attn_layer_desc *layer)
{
    const bool exact = !(b->flags & ATTN_BATCH_HOST_BOUNDS);
    bool whole = b->num_actual_tokens == b->query_start_loc_host[b->num_reqs];
    whole &= b->tree == NULL || layer->tree_mask != ATTN_TREE_NONE;
    for (int32_t r = 0; r < b->num_reqs && exact; r++) {
        const int32_t *start = b->query_start_loc;
        whole &= start[r + 1] == b->query_start_loc_host[r + 1] &&
                 start[r + 1] - start[r] <= b->max_query_len;
        whole &= b->seq_lens == NULL || b->seq_lens[r] <= b->max_seq_len;
        whole &= b->seq_lens_host == NULL || b->seq_lens[r] == b->seq_lens_host[r];
        whole &= b->encoder_seq_lens_host == NULL ||
                 b->encoder_seq_lens[r] == b->encoder_seq_lens_host[r];
    }
    return whole;
}

/* plan and attend get the limits that schedule_size was asked with, and what it answered. */
static attn_status check_limits(const struct attn_attend_args *args, struct attn_error *error)
{
    struct attn_schedule_size size = {.struct_size = sizeof size};
    if (args->limits == NULL || args->batch->num_reqs > args->limits->max_num_reqs ||
        !is_whole(args->batch, args->layer)) {
        return ATTN_ERROR_PLUGIN;
    }
    const struct attn_schedule_size_args asked =
        SIZED(attn_schedule_size_args, .limits = args->limits, .plan_state = args->plan_state);
    return schedule_size(&asked, &size, error) == ATTN_OK && is_prepared(args) &&
                   size.host_bytes == args->schedule_host_bytes &&
                   size.device_bytes == args->workspace_bytes
               ? ATTN_OK
               : ATTN_ERROR_PLUGIN;
}

/* The two ends of a schedule's memory on the device, which no other schedule may touch. */
static uint8_t *end_of_schedule(const struct attn_attend_args *args, int32_t end)
{
    const size_t last = (args->workspace_bytes - sizeof args->limits) / 8 * 8;
    return (uint8_t *)args->workspace + (end == 0 ? 0 : last);
}

static attn_status plan(const struct attn_attend_args *args, int32_t mode, struct attn_error *error)
{
    for (int32_t end = 0; end < 2; end++) {
        memcpy(end_of_schedule(args, end), &args->limits, sizeof args->limits);
    }
    recorded.schedules++;
    recorded.other_streams += args->stream != recorded.stream;
    recorded.planned = value_of(args->layer->next);
    recorded.planned_batch = value_of(args->batch->next);
    return check_limits(args, error);
}

static attn_status update_block_table(const struct attn_attend_args *args, struct attn_error *error)
{
    recorded.table_updates++;
    return check_limits(args, error);
}

/* Numbers, which are quantized after it. */
static attn_status attend_codes(const struct attn_attend_args *args, struct attn_error *error)
{
    static float numbers[1 << 14];
    const struct attn_io_output_quant *given = (const struct attn_io_output_quant *)args->next;
    struct attn_layer_desc layer = *args->layer;
    struct attn_attend_args plain = *args;
    const int64_t *shape = args->out->shape;
    const struct attn_tensor x = {.data = numbers,
                                  .device = args->q->device,
                                  .ndim = 3,
                                  .dtype = args->q->dtype,
                                  .shape = args->out->shape};
    if (shape[0] * shape[1] * shape[2] > (int64_t)(sizeof numbers / sizeof *numbers)) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    recorded.coded++;
    layer.output_form = ATTN_OUTPUT_PLAIN;
    plain.layer = &layer;
    plain.out = &x;
    plain.next = NULL;
    attn_status status = real_kernels.attend(&plain, error);
    const struct attn_quantize_args quantize = SIZED(
        attn_quantize_args, .instance = args->instance, .form = args->layer->output_form,
        .scale_form = ATTN_SCALE_PER_TENSOR, .x = &x, .out = args->out, .scale = given->scale);
    return status == ATTN_OK ? real_kernels.quantize(&quantize, error) : status;
}

/* Whether the batch has arrays that the layer does not say, or slots without a cache. */
static bool has_unread(const struct attn_attend_args *args)
{
    const struct attn_layer_desc *l = args->layer;
    const struct attn_batch *b = args->batch;
    return (b->causal_per_request != NULL && !l->causal_per_request) ||
           (b->tree != NULL && l->tree_mask == ATTN_TREE_NONE) ||
           ((b->spans != NULL || b->span_start_loc != NULL || b->num_spans != 0) &&
            !l->prefix_lm) ||
           ((b->slot_mapping != NULL || b->num_slots != 0) && args->k_cache == NULL);
}

static attn_status attend(const struct attn_attend_args *args, struct attn_error *error)
{
    attn_status status = check_limits(args, error);
    if (status != ATTN_OK) {
        return status;
    }
    for (int32_t end = 0; end < 2; end++) {
        if (memcmp(end_of_schedule(args, end), &args->limits, sizeof args->limits) != 0) {
            return ATTN_ERROR_PLUGIN;
        }
    }
    recorded.attends++;
    recorded.unread += has_unread(args);
    if (args->k_cache != NULL) {
        recorded.block_size =
            args->k_cache->block_size == args->layer->block_size ? args->layer->block_size : -1;
    }
    recorded.of_layer = value_of(args->layer->next);
    recorded.of_run = value_of(args->next);
    recorded.of_batch = value_of(args->batch->next);
    if (!(args->flags & ATTN_RUN_NO_WRITE)) {
        recorded.fused++;
        recorded.fused_prefills += args->phase == ATTN_PHASE_PREFILL;
    }
    recorded.other_streams += args->stream != recorded.stream;
    status = args->layer->output_form != ATTN_OUTPUT_PLAIN ? attend_codes(args, error)
                                                           : real_kernels.attend(args, error);
    if (status == ATTN_OK && recorded.failing > 0 && --recorded.failing == 0) {
        if (error != NULL) {
            error->status = ATTN_ERROR_DEVICE;
            snprintf(error->message, sizeof error->message, "as asked");
        }
        return ATTN_ERROR_DEVICE;
    }
    return status;
}

static attn_status merge_states(const struct attn_merge_states_args *args, struct attn_error *error)
{
    recorded.other_streams += args->stream != recorded.stream;
    return real_kernels.merge_states(args, error);
}

static attn_status write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    recorded.writes++;
    recorded.other_streams += args->stream != recorded.stream;
    return real_kernels.write_kv(args, error);
}

static attn_status rope_write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    recorded.rope_writes++;
    return real_kernels.rope_write_kv(args, error);
}

static attn_status declare_backends(const struct attn_probe_sink *sink,
                                    const struct attn_backend_caps *caps, struct attn_error *why)
{
    struct attn_backend_caps renamed = *caps;
    static uint32_t extensions[2 + RECORDED_DRAFTS] = {ATTN_EXT_VENDOR, RECORDED_EXTENSION};
    for (uint32_t i = 0; i < RECORDED_DRAFTS; i++) {
        extensions[2 + i] = ATTN_EXT_DRAFT_KERNELS + i;
    }
    renamed.name = "recording";
    renamed.extensions = extensions;
    renamed.num_extensions = 2 + RECORDED_DRAFTS;
    attn_status status = sink->backend(sink->user, &renamed, why);
    renamed.name = "recording_apart";
    renamed.num_extensions = 1;
    renamed.decode_write_kv_dtypes = 0;
    status = status == ATTN_OK ? sink->backend(sink->user, &renamed, why) : status;
    static const struct attn_range blocks[] = {{4, 8, 4}};
    renamed = *caps;
    renamed.name = "recording_narrow";
    renamed.block_sizes = blocks;
    renamed.num_block_sizes = 1;
    renamed.preferred_block_size = 4;
    renamed.terms &= ~(ATTN_TERM_CHUNKED_LOCAL | ATTN_TERM_STATIC_SINK);
    status = status == ATTN_OK ? sink->backend(sink->user, &renamed, why) : status;
    renamed = *caps;
    renamed.name = "recording_codes";
    renamed.output_forms |= 1u << ATTN_OUTPUT_FP8_STATIC;
    return status == ATTN_OK ? sink->backend(sink->user, &renamed, why) : status;
}

static attn_status create_recording(const struct attn_create_args *args, attn_instance **instance,
                                    const struct attn_kernels **table, struct attn_error *error)
{
    snprintf(recorded.folder, sizeof recorded.folder, "%s",
             args->cache_dir != NULL ? args->cache_dir : "none");
    return create(args, instance, table, error);
}

static void change_kernels(struct attn_kernels *kernels)
{
    kernels->attend = attend;
    kernels->prepare = prepare;
    kernels->release = release;
    kernels->schedule_size = schedule_size;
    kernels->create_plan_state = create_plan_state;
    kernels->destroy_plan_state = destroy_plan_state;
    kernels->schedule = plan;
    kernels->update_block_table = update_block_table;
    kernels->write_kv = write_kv;
    kernels->merge_states = merge_states;
    kernels->rope_write_kv = rope_write_kv;
}

CPU_REF_BACKEND("recording", create_recording, NULL)
