/* SPDX-License-Identifier: Apache-2.0 */
/* Making a plan: its steps and the memory for them. */
#include "step/plan.h"

#include <string.h>

#include "select/layer_check.h"
#include "select/layer_ext.h"
#include "select/names.h"
#include "step/encoder.h"
#include "step/gdn.h"
#include "step/mla.h"
#include "step/parallel.h"
#include "step/schedule.h"
#include "util/structs.h"

#define MIN_PLAN_OPTIONS 64 /* sizes in ABI 0.1 */
#define MIN_LIMITS 40
#define ALIGNMENT 256
#define MAX_AREA 0x1p58 /* bytes; the sum of all areas fits in 64 bits */

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* Limits under which no size below overflows: a bound on the largest area, in floating point. The
 * widest are partial results of all ranks' rows and heads, and log-sum-exps of all their parts. */
static attn_status check_sizes(const attn_plan *plan, struct attn_error *error)
{
    int64_t integers = compose_max_integers(plan);
    if (integers > MAX_INTEGERS) {
        return error_set(error, ATTN_ERROR_LIMIT, "max_num_reqs",
                         "%d requests of %d tokens take %lld integers in a plan; at most %d",
                         plan->limits.max_num_reqs, plan->limits.max_num_tokens,
                         (long long)integers, MAX_INTEGERS);
    }
    for (int32_t i = 0; i < plan->num_steps; i++) {
        const attn_layer *layer = plan->steps[i].layer;
        double ranks = layer_cache_ranks(layer);
        double rows = layer_splits_queries(layer) ? layer->selected->cp->prefill->world_size : 1;
        double heads = plan->steps[i].q.heads > plan->steps[i].out.heads ? plan->steps[i].q.heads
                                                                         : plan->steps[i].out.heads;
        double bytes = ranks * ranks * rows * plan->limits.max_num_tokens * heads * MAX_LATENT * 8;
        if (bytes > MAX_AREA) {
            return error_set(error, ATTN_ERROR_LIMIT, "max_num_tokens",
                             "%d tokens of %.0f heads over %.0f ranks: parts of a workspace may "
                             "take %g bytes, and %g are the most",
                             plan->limits.max_num_tokens, heads, ranks * rows, bytes, MAX_AREA);
        }
    }
    return ATTN_OK;
}

/* Lays the workspace out: the core's own arrays and partial results, then each schedule's. */
static void lay_out(attn_plan *plan)
{
    size_t tokens = (size_t)plan->limits.max_num_tokens, row = 0, heads = 0, at = 0;
    bool merges = false, quantizes = false;
    for (int32_t i = 0; i < plan->num_steps; i++) {
        const struct step *step = &plan->steps[i];
        size_t bytes = (size_t)step->out.heads * (size_t)step->out.head_size *
                       (step->layer->desc->dtype == ATTN_DTYPE_F32 ? 4 : 2);
        row = bytes > row ? bytes : row;
        heads = (size_t)step->q.heads > heads ? (size_t)step->q.heads : heads;
        merges |= step->launches[ATTN_PHASE_PREFILL][PART_PREFIX].kernel != NULL ||
                  step->launches[ATTN_PHASE_PREFILL][PART_SINK].kernel != NULL ||
                  step->launches[ATTN_PHASE_PREFILL][PART_CONTEXT].kernel != NULL;
        quantizes |= step->quantizes;
    }
    plan->num_integers = compose_max_integers(plan);
    plan->scratch.integers = at;
    at += aligned((size_t)plan->num_integers * sizeof(int32_t));
    plan->scratch.out = at;
    at += merges ? aligned(tokens * row) : 0;
    for (int32_t i = 0; i < 2; i++) {
        plan->scratch.lse[i] = at;
        at += merges ? aligned(tokens * heads * sizeof(float)) : 0;
    }
    plan->scratch.plain = at;
    at += quantizes ? aligned(tokens * row) : 0;
    at = mla_lay_out(plan, at);
    at = parallel_lay_out(plan, at);
    at = encoder_lay_out(plan, at);
    for (int32_t i = 0; i < plan->num_schedules; i++) {
        plan->schedules[i].device_offset = at;
        at += aligned(plan->schedules[i].device_bytes);
    }
    plan->scratch.bytes = at;
}

static attn_status read_options(attn_plan *plan, const struct attn_plan_options *options,
                                struct attn_error *error)
{
    struct attn_plan_options read;
    attn_status status =
        struct_read(&read, sizeof read, MIN_PLAN_OPTIONS, options, "attn_plan_options", error);
    status = status ? status : ext_check(read.next, NULL, 0, "attn_plan_options", error);
    status = status ? status
                    : struct_read(&plan->limits, sizeof plan->limits, MIN_LIMITS, &options->limits,
                                  "attn_limits", error);
    if (status == ATTN_OK && (plan->limits.max_num_reqs <= 0 || plan->limits.max_num_tokens <= 0 ||
                              plan->limits.max_query_len < 0 || plan->limits.max_seq_len < 0 ||
                              plan->limits.max_blocks_per_req < 0)) {
        return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "max_num_reqs",
                         "limits of %d requests, %d tokens, query_len %d, seq_len %d, %d blocks; "
                         "requests and tokens of 1 or more, the others from 0 (unknown)",
                         plan->limits.max_num_reqs, plan->limits.max_num_tokens,
                         plan->limits.max_query_len, plan->limits.max_seq_len,
                         plan->limits.max_blocks_per_req);
    }
    if (status == ATTN_OK) {
        plan->graph = read.graph;
        plan->limits.max_query_len = plan->limits.max_query_len > 0 ? plan->limits.max_query_len
                                                                    : plan->limits.max_num_tokens;
    }
    return status;
}

/* Tells the layers, and those whose caches they read, that they are in one plan more, or one less.
 */
static void count_in(attn_plan *plan, int32_t change)
{
    pthread_mutex_lock(&plan->model->lock);
    for (int32_t i = 0; i < plan->num_steps; i++) {
        attn_layer *layer = plan->steps[i].layer, *owner = layer->owner;
        layer->num_plans += change;
        owner->num_plans += owner != layer ? change : 0;
    }
    plan->counted = change > 0;
    pthread_mutex_unlock(&plan->model->lock);
}

static attn_status fill_plan(attn_plan *plan, struct attn_error *error)
{
    attn_runtime *runtime = plan->model->runtime;
    attn_status status = ATTN_OK;
    for (int32_t i = 0; i < plan->model->num_layers; i++) {
        plan->num_steps += plan->model->layers[i].group == plan->group;
    }
    size_t calls = (size_t)plan->num_steps * ATTN_PHASE_COUNT * PART_COUNT;
    plan->steps = runtime_alloc(runtime, (size_t)plan->num_steps * sizeof *plan->steps);
    plan->schedules = runtime_alloc(runtime, calls * sizeof *plan->schedules);
    if (plan->steps == NULL || plan->schedules == NULL) {
        return error_set(error, ATTN_ERROR_OUT_OF_MEMORY, "plan", "no memory for %d layers",
                         plan->num_steps);
    }
    for (int32_t i = 0; i < plan->model->num_layers && status == ATTN_OK; i++) {
        if (plan->model->layers[i].group == plan->group) {
            status = step_make(plan, &plan->model->layers[i], error);
        }
    }
    if (status != ATTN_OK) {
        return status;
    }
    count_in(plan, 1);
    status = mla_init(plan, error);
    status = status == ATTN_OK ? parallel_init(plan, error) : status;
    if (status != ATTN_OK) {
        return status;
    }
    status = check_sizes(plan, error);
    if (status != ATTN_OK) {
        return status;
    }
    lay_out(plan);
    plan->integers = runtime_alloc(runtime, (size_t)plan->num_integers * sizeof(int32_t));
    return plan->integers != NULL ? ATTN_OK
                                  : error_set(error, ATTN_ERROR_OUT_OF_MEMORY, "plan", "no memory");
}

attn_status plan_create(attn_model *model, int32_t group, const struct attn_plan_options *options,
                        attn_plan **out, struct attn_error *error)
{
    if (out == NULL) {
        return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "plan", "plan is NULL");
    }
    *out = NULL;
    if (model == NULL || group < 0 || group >= model->num_groups) {
        return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "group",
                         "model %p, group %d; the model has %d block-table groups", (void *)model,
                         group, model != NULL ? model->num_groups : 0);
    }
    attn_plan *plan = runtime_alloc(model->runtime, sizeof *plan);
    if (plan == NULL) {
        return error_set(error, ATTN_ERROR_OUT_OF_MEMORY, "plan", "no memory for the plan");
    }
    plan->model = model;
    plan->group = group;
    for (int32_t i = model->num_layers - 1; i >= 0; i--) {
        plan->table = model->layers[i].group == group ? model->layers[i].table : plan->table;
    }
    plan->validate = model->runtime->settings.validate;
    for (int32_t i = 0; i < model->runtime->num_devices; i++) {
        const struct attn_device_info *device = &model->runtime->devices[i];
        if (device->device.type == model->device.type && device->device.id == model->device.id) {
            plan->num_multiprocessors = device->num_multiprocessors;
        }
    }
    attn_status status = read_options(plan, options, error);
    status = status == ATTN_OK ? fill_plan(plan, error) : status;
    if (status == ATTN_OK && plan->graph && plan_graph_level(plan) == ATTN_GRAPH_NEVER) {
        status = error_set(error, ATTN_ERROR_UNSUPPORTED, "graph",
                           "a layer of group %d cannot be captured (graph level never)", group);
    }
    if (status != ATTN_OK) {
        plan_destroy(plan);
        return status;
    }
    *out = plan;
    return ATTN_OK;
}

void plan_destroy(attn_plan *plan)
{
    if (plan == NULL) {
        return;
    }
    attn_runtime *runtime = plan->model->runtime;
    if (plan->counted) {
        count_in(plan, -1);
    }
    size_t calls = (size_t)plan->num_steps * ATTN_PHASE_COUNT * PART_COUNT;
    for (int32_t i = 0; plan->schedules != NULL && i < plan->num_schedules; i++) {
        runtime_free(runtime, plan->schedules[i].host, plan->schedules[i].host_bytes);
    }
    mla_finish(plan);
    parallel_finish(plan);
    runtime_free(runtime, plan->integers, (size_t)plan->num_integers * sizeof(int32_t));
    runtime_free(runtime, plan->schedules, calls * sizeof *plan->schedules);
    runtime_free(runtime, plan->steps, (size_t)plan->num_steps * sizeof *plan->steps);
    runtime_free(runtime, plan, sizeof *plan);
}

size_t plan_workspace_bytes(const attn_plan *plan)
{
    return plan != NULL ? plan->scratch.bytes : 0;
}

attn_status plan_bind_workspace(attn_plan *plan, void *workspace, size_t bytes,
                                struct attn_error *error)
{
    if (plan == NULL || workspace == NULL || (uintptr_t)workspace % ALIGNMENT != 0) {
        return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "workspace",
                         "plan %p, workspace %p; an address that is a multiple of %d", (void *)plan,
                         workspace, ALIGNMENT);
    }
    if (bytes < plan->scratch.bytes) {
        return error_set(error, ATTN_ERROR_WORKSPACE, "bytes", "%zu bytes; the plan needs %zu",
                         bytes, plan->scratch.bytes);
    }
    plan->workspace = workspace;
    plan->workspace_bytes = bytes;
    plan->ready = NULL;
    for (int32_t i = 0; i < plan->num_steps; i++) {
        for (int32_t j = 0; j < ATTN_PHASE_COUNT * PART_COUNT; j++) {
            struct launch *launch = &plan->steps[i].launches[j / PART_COUNT][j % PART_COUNT];
            if (launch->schedule != NULL) {
                launch->args.workspace = plan->workspace + launch->schedule->device_offset;
            }
        }
    }
    return ATTN_OK;
}

int32_t plan_graph_level(const attn_plan *plan)
{
    int32_t level = ATTN_GRAPH_ALWAYS;
    for (int32_t i = 0; plan != NULL && i < plan->num_steps; i++) {
        for (int32_t phase = 0; phase < ATTN_PHASE_COUNT; phase++) {
            int32_t mine = plan->steps[i].layer->served[phase].graph_level;
            level = mine < level ? mine : level;
        }
    }
    return plan != NULL ? level : ATTN_GRAPH_NEVER;
}

int32_t plan_graph_fill(const attn_plan *plan)
{
    return plan != NULL && plan->num_steps > 0
               ? plan->steps[0].layer->served[ATTN_PHASE_DECODE].instance->caps->graph_fill_seq_len
               : 0;
}
