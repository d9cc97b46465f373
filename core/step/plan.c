/* SPDX-License-Identifier: Apache-2.0 */
/* Making a plan: its steps and the memory for them. */
#include "bind/address_check.h"
#include "step/plan_state.h"

#define MAX_AREA 0x1p58 /* bytes; the sum of all areas fits in 64 bits */

/* Heads of q or out, whichever are more: MLA's partial results have the engine's padded heads. */
static int64_t widest_heads(const struct step *step)
{
    return step->q.heads > step->out.heads ? step->q.heads : step->out.heads;
}

/* Limits under which no size below overflows: a bound on the largest area, in floating point. The
 * widest are partial results of all ranks' rows and heads, and log-sum-exps of all their parts. */
attn_status plan_check_area(const attn_plan *plan, const struct step *step, double ranks,
                            double parts, struct attn_error *error)
{
    double heads = (double)widest_heads(step);
    double bytes = parts * plan->limits.max_num_tokens * heads * MAX_LATENT * 8;
    ERROR_IF(bytes > MAX_AREA, ATTN_ERROR_LIMIT, "max_num_tokens",
             "%d tokens of %.0f heads over %.0f ranks: parts of a workspace may take %g bytes, and "
             "%g are the most",
             plan->limits.max_num_tokens, heads, ranks, bytes, MAX_AREA);
    return ATTN_OK;
}

static attn_status check_sizes(attn_plan *plan, struct attn_error *error)
{
    ERROR_IF(plan->num_host_ints > MAX_HOST_INTS, ATTN_ERROR_LIMIT, "max_num_reqs",
             "%d requests of %d tokens take %lld integers in a plan; at most %d",
             plan->limits.max_num_reqs, plan->limits.max_num_tokens, (long long)plan->num_host_ints,
             MAX_HOST_INTS);
    for (int32_t i = 0; i < plan->num_steps; i++) {
        TRY(plan_check_area(plan, &plan->steps[i], 1, 1, error));
    }
    return ATTN_OK;
}

void plan_area(attn_plan *plan, size_t *place, int64_t bytes, uint32_t uses)
{
    const size_t aligned = (size_t)plan_aligned(bytes);
    struct area **area = &plan->areas;
    while (*area != NULL && (*area)->place != place) {
        area = &(*area)->next;
    }
    *area = *area != NULL ? *area : arena_alloc(&plan->arena, sizeof **area);
    if (*area != NULL) { /* else arena.failed says so */
        (*area)->place = place;
        (*area)->bytes = aligned > (*area)->bytes ? aligned : (*area)->bytes;
        (*area)->uses |= uses;
    }
}

void plan_area_of_merge(attn_plan *plan, const struct step *step, int64_t rows, uint32_t uses)
{
    const int64_t lse = rows * widest_heads(step) * (int64_t)sizeof(float);
    plan_area(plan, &plan->layout.out, rows * step_row_bytes(step), uses);
    plan_area(plan, &plan->layout.lse[0], lse, uses);
    plan_area(plan, &plan->layout.lse[1], lse, uses);
}

/* Each area as low as those before it that are used with it allow. Returns where the last ends. */
static size_t place_areas(attn_plan *plan)
{
    size_t end = 0;
    for (struct area *area = plan->areas; area != NULL; area = area->next) {
        size_t at = 0;
        const struct area *other = plan->areas;
        while (other != area) {
            const size_t taken = *other->place, taken_end = taken + other->bytes;
            const bool meets =
                area->uses & other->uses && at < taken_end && taken < at + area->bytes;
            at = meets ? taken_end : at;
            other = meets ? plan->areas : other->next; /* all again, from the higher place */
        }
        *area->place = at;
        end = at + area->bytes > end ? at + area->bytes : end;
    }
    return end;
}

/* Lays the workspace out. The plan's own part has the core's arrays and each schedule's memory, the
 * scratch areas, then kernels' scratch, of which one is used at a time. */
static void lay_out(attn_plan *plan)
{
    const int64_t host_ints = plan->num_host_ints * (int64_t)sizeof(int32_t);
    size_t own = block_table_lay_out(plan, (size_t)plan_aligned(host_ints)), most_scratch = 0;
    for (int32_t i = 0; i < plan->num_schedules; i++) {
        const struct plan_schedule *s = &plan->schedules[i];
        plan->schedules[i].device_offset = own;
        own += (size_t)plan_aligned((int64_t)s->size.device_bytes);
        most_scratch = s->size.scratch_bytes > most_scratch ? s->size.scratch_bytes : most_scratch;
    }
    plan->layout.of_kernels = place_areas(plan);
    plan->layout.own_bytes = own;
    plan->layout.scratch_bytes =
        plan->layout.of_kernels + (size_t)plan_aligned((int64_t)most_scratch);
}

static attn_status read_options(attn_plan *plan, const struct attn_plan_options *options,
                                struct attn_error *error)
{
    struct attn_plan_options read;
    TRY(struct_read(&read, ABI_PLAN_OPTIONS, options, error));
    TRY(struct_read(&plan->limits, ABI_LIMITS, read.limits, error));
    plan->limits.next = NULL;
    plan->graph = read.graph;
    plan->limits.max_query_len =
        plan->limits.max_query_len > 0 ? plan->limits.max_query_len : plan->limits.max_num_tokens;
    return ATTN_OK;
}

/* The layers, and those whose caches they read, are in one plan more, or one less. */
static void count_in(attn_plan *plan, int32_t change)
{
    const bool taken = lock_take(&plan->model->lock);
    for (int32_t i = 0; i < plan->num_steps; i++) {
        attn_layer *layer = plan->steps[i].layer, *owner = layer->owner;
        layer->num_plans += change;
        owner->num_plans += owner != layer ? change : 0;
    }
    plan->counted = change > 0;
    if (taken) {
        lock_give(&plan->model->lock);
    }
}

/* Requests of up to so many queries go the decode way. */
static int32_t threshold_of(const attn_layer *layer)
{
    const struct attn_layer_desc *l = layer->desc;
    int32_t declared = layer->served[ATTN_PHASE_DECODE].instance->caps->reorder_threshold;
    if (l->num_speculative_tokens > 0) {
        return 1 + l->num_speculative_tokens * (l->parallel_drafting ? 2 : 1);
    }
    return declared > 1 ? declared : 1;
}

static bool is_in(const attn_plan *plan, const attn_layer *layer)
{
    return layer->group == plan->group;
}

/* What batches may bring of vendors' extensions: every layer's backends read them, then. */
static void find_vendor_ids(attn_plan *plan)
{
    uint32_t ids[MAX_VENDOR_EXTENSIONS];
    const int32_t count = layer_vendor_ids(plan->steps[0].layer->desc->next, ids);
    for (int32_t i = 0; i < count; i++) {
        bool all = true;
        for (int32_t s = 1; s < plan->num_steps; s++) {
            all &= ext_find(plan->steps[s].layer->desc->next, ids[i]) != NULL;
        }
        if (all) {
            plan->vendor_ids[plan->num_vendor_ids++] = ids[i];
        }
    }
}

static attn_status fill_plan(attn_plan *plan, const struct attn_plan_options *options,
                             struct attn_error *error)
{
    TRY(read_options(plan, options, error));
    for (int32_t i = 0; i < plan->model->num_layers; i++) {
        const attn_layer *layer = &plan->model->layers[i];
        plan->num_steps += is_in(plan, layer);
        plan->composed_by |= is_in(plan, layer) ? layer->composed_by : 0;
    }
    FOR_COMPOSED(c, plan->composed_by) {
        plan->data[c - compositions] = arena_alloc(&plan->arena, (*c)->plan_bytes);
    }
    size_t calls = (size_t)plan->num_steps * NUM_PHASES * PART_COUNT;
    plan->steps = arena_array(&plan->arena, (size_t)plan->num_steps, sizeof *plan->steps);
    plan->schedules = arena_array(&plan->arena, calls, sizeof *plan->schedules);
    plan->step_of_slot =
        arena_array(&plan->arena, (size_t)plan->num_steps, sizeof *plan->step_of_slot);
    NO_MEMORY_IF(plan->arena.failed, "plan", "the plan");
    for (int32_t i = 0; i < plan->num_steps; i++) {
        plan->step_of_slot[i] = &plan->steps[i];
    }
    for (int32_t i = 0; i < plan->model->num_layers; i++) {
        TRY_IF(is_in(plan, &plan->model->layers[i]),
               step_begin(plan, &plan->model->layers[i], error));
    }
    plan->table = plan->steps[0].layer->table;
    plan->max_reqs = plan->limits.max_num_reqs;
    plan->num_host_ints = 1; /* engines allocate a workspace unasked: none is empty */
    plan->decode_threshold = threshold_of(plan->steps[0].layer);
    for (int32_t part = 0; part < PART_COUNT; part++) {
        plan->part_limits[part] = plan->limits;
    }
    FOR_COMPOSED(c, plan->composed_by) {
        TRY_IF((*c)->build != NULL, (*c)->build(plan, error));
    }
    TRY(check_sizes(plan, error));
    for (int32_t i = 0; i < plan->num_steps; i++) {
        TRY(step_finish(plan, &plan->steps[i], error));
    }
    find_vendor_ids(plan);
    batch_fields_init(plan);
    TRY(tables_init(plan, error));
    TRY(block_table_init(plan, error));
    count_in(plan, 1);
    lay_out(plan);
    plan->host_ints =
        arena_array(&plan->arena, (size_t)plan->num_host_ints, sizeof *plan->host_ints);
    NO_MEMORY_IF(plan->arena.failed, "plan", "the plan");
    ERROR_IF(plan->graph && plan_graph_level(plan) == ATTN_GRAPH_NEVER, ATTN_ERROR_UNSUPPORTED,
             "graph", "a layer of group %d cannot be captured (graph level never)", plan->group);
    return ATTN_OK;
}

attn_status plan_create(attn_model *model, int32_t group, const struct attn_plan_options *options,
                        attn_plan **out, struct attn_error *error)
{
    BAD_IF(out == NULL, "plan", "plan is NULL");
    *out = NULL;
    BAD_IF(model == NULL || group < 0 || group >= model->num_groups, "group",
           "model %p, group %d; the model has %d block-table groups", (void *)model, group,
           model != NULL ? model->num_groups : 0);
    attn_plan *plan = runtime_alloc(model->runtime, sizeof *plan);
    NO_MEMORY_IF(plan == NULL, "plan", "the plan");
    arena_init(&plan->arena, &model->runtime->host);
    plan->model = model;
    plan->group = group;
    plan->validate = model->runtime->settings.validate;
    plan->looks = plan->validate && model->device.type == ATTN_DEVICE_CPU;
    const attn_status status = fill_plan(plan, options, error);
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
    for (int32_t i = 0; plan->schedules != NULL && i < plan->num_schedules; i++) {
        const struct plan_schedule *s = &plan->schedules[i];
        runtime_free(runtime, s->host, s->size.host_bytes);
        if (s->state != NULL) {
            s->instance->kernels.destroy_plan_state(s->instance->handle, s->state);
        }
    }
    arena_finish(&plan->arena);
    runtime_free(runtime, plan, sizeof *plan);
}

attn_status plan_workspace(const attn_plan *plan, struct attn_workspace *workspace,
                           struct attn_error *error)
{
    BAD_IF(plan == NULL || workspace == NULL, "plan", "plan %p, workspace %p; neither may be NULL",
           (const void *)plan, (void *)workspace);
    const struct attn_workspace answer = {.struct_size = sizeof answer,
                                          .bytes =
                                              plan->layout.own_bytes + plan->layout.scratch_bytes,
                                          .scratch_bytes = plan->layout.scratch_bytes,
                                          .device = plan->model->device,
                                          .alignment = WORKSPACE_ALIGNMENT};
    return struct_give(workspace, &answer, ABI_WORKSPACE, error);
}

static attn_status check_parts(const attn_plan *plan, const struct attn_workspace *given,
                               struct attn_error *error)
{
    const size_t own = plan->layout.own_bytes, scratch = plan->layout.scratch_bytes;
    if (given->scratch == NULL) {
        ERROR_IF(given->bytes < own + scratch, ATTN_ERROR_WORKSPACE, "bytes",
                 "%zu bytes; the plan needs %zu", given->bytes, own + scratch);
        return ATTN_OK;
    }
    BAD_IF((uintptr_t)given->scratch % WORKSPACE_ALIGNMENT != 0, "scratch",
           "scratch %p; an address that is a multiple of %d", given->scratch, WORKSPACE_ALIGNMENT);
    const uintptr_t memory = (uintptr_t)given->memory, apart = (uintptr_t)given->scratch;
    BAD_IF(apart >= memory ? apart - memory < own : memory - apart < scratch, "scratch",
           "scratch %p lies in the plan's own part, %zu bytes at %p, or holds some of it",
           given->scratch, own, given->memory);
    return given->bytes >= given->scratch_bytes && given->scratch_bytes >= scratch &&
                   given->bytes - given->scratch_bytes >= own
               ? ATTN_OK
               : error_set(error, ATTN_ERROR_WORKSPACE, "scratch_bytes",
                           "%zu bytes, of them %zu of scratch; the plan needs %zu of its own and "
                           "%zu of scratch",
                           given->bytes, given->scratch_bytes, own, scratch);
}

attn_status plan_bind_workspace(attn_plan *plan, const struct attn_workspace *workspace,
                                struct attn_error *error)
{
    struct attn_workspace read;
    TRY(struct_read(&read, ABI_WORKSPACE, workspace, error));
    BAD_IF(plan == NULL || read.memory == NULL || (uintptr_t)read.memory % WORKSPACE_ALIGNMENT != 0,
           "workspace", "plan %p, workspace %p; an address that is a multiple of %d", (void *)plan,
           read.memory, WORKSPACE_ALIGNMENT);
    TRY(check_parts(plan, &read, error));
    TRY(address_check_device(plan->model, read.device, "workspace", error));
    TRY(address_ask(plan->model, read.memory, "workspace", error));
    TRY(address_ask(plan->model, read.scratch, "scratch", error));
    plan->workspace = read.memory;
    plan->scratch = read.scratch != NULL ? read.scratch : plan->workspace + plan->layout.own_bytes;
    plan->ready = NULL;
    for (int32_t i = 0; i < plan->num_steps; i++) {
        for (int32_t j = 0; j < NUM_PHASES * PART_COUNT; j++) {
            struct launch *launch = &plan->steps[i].launches[j / PART_COUNT][j % PART_COUNT];
            if (launch->schedule != NULL) {
                launch->args.workspace = plan->workspace + launch->schedule->device_offset;
                launch->args.scratch = plan->scratch + plan->layout.of_kernels;
            }
        }
    }
    return ATTN_OK;
}

int32_t plan_graph_level(const attn_plan *plan)
{
    int32_t level = ATTN_GRAPH_ALWAYS;
    for (int32_t i = 0; plan != NULL && i < plan->num_steps; i++) {
        for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
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
