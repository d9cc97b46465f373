/* SPDX-License-Identifier: Apache-2.0 */
/* plan(): which calls this batch takes, over which view of it, and the vendors' own plans. */
#include <string.h>

#include "step/encoder.h"
#include "step/gdn.h"
#include "step/mla.h"
#include "step/parallel.h"
#include "step/queries.h"
#include "step/schedule.h"
#include "util/structs.h"

static int32_t threshold_of(const attn_plan *plan)
{
    const attn_layer *layer = plan->steps[0].layer;
    const struct attn_layer_desc *l = layer->desc;
    int32_t declared = layer->served[ATTN_PHASE_DECODE].instance->caps->reorder_threshold;
    if (l->kind == ATTN_LAYER_MLA && layer_is_spread(layer)) {
        return 1; /* more queries are causal among keys that lie on several ranks */
    }
    if (l->num_speculative_tokens > 0) {
        return 1 + l->num_speculative_tokens * (l->parallel_drafting ? 2 : 1);
    }
    return declared > 1 ? declared : 1;
}

static void use(attn_plan *plan, struct launch *launch, int32_t view)
{
    launch->schedule->view = view;
    launch->args.batch = &plan->views[view];
}

/* One backend for both phases that takes mixed batches whole, or a layer with one phase: one call.
 */
static bool takes_whole(const struct step *step)
{
    const struct served *served = step->layer->served;
    return step->keys_are_inputs || (served[0].instance == served[1].instance &&
                                     served[0].instance->caps->features & ATTN_FEATURE_MIXED_BATCH);
}

static void choose_calls(attn_plan *plan, struct step *step)
{
    struct launch *prefill = &step->launches[ATTN_PHASE_PREFILL][PART_MAIN];
    struct launch *decode = &step->launches[ATTN_PHASE_DECODE][PART_MAIN];
    bool all_decode = plan->split.num_prefills == 0 && !step->keys_are_inputs;
    step->main[0] = step->main[1] = NULL;
    step->program = run_attends;
    if (!layer_is_spread(step->layer) && !plan->parallel.split &&
        plan->split.num_decode_tokens == 0 && plan->split.num_prefill_tokens == 0) {
        step->program = run_no_queries; /* query_start_loc may begin above 0 */
        return;
    }
    if (step->layer->selected->mla != NULL) {
        mla_choose_calls(plan, step);
        return;
    }
    if (step->layer->selected->gdn != NULL) {
        gdn_choose_calls(plan, step);
        return;
    }
    if (layer_is_spread(step->layer)) {
        parallel_choose_calls(plan, step);
        return;
    }
    if (plan->given.num_actual_tokens == 0) {
        step->program = run_no_queries;
        return;
    }
    if (cascade_pays(plan, step)) {
        struct launch *prefix = &step->launches[ATTN_PHASE_PREFILL][PART_PREFIX];
        step->main[0] = all_decode ? decode : prefill;
        use(plan, step->main[0], VIEW_SUFFIX);
        use(plan, prefix, VIEW_PREFIX);
        step->program = run_cascade;
        return;
    }
    if (layer_is_quantized_encoder(step->layer)) {
        step->program = run_encoder;
    }
    if (takes_whole(step)) {
        step->main[0] = all_decode ? decode : prefill;
        use(plan, step->main[0], VIEW_WHOLE);
    } else {
        int32_t calls = 0;
        if (plan->split.num_decodes > 0) {
            step->main[calls++] = decode;
            use(plan, decode, VIEW_DECODE);
        }
        if (plan->split.num_prefills > 0) {
            step->main[calls++] = prefill;
            use(plan, prefill, VIEW_PREFILL);
        }
    }
    if (step->launches[ATTN_PHASE_PREFILL][PART_SINK].kernel != NULL) {
        use(plan, &step->launches[ATTN_PHASE_PREFILL][PART_SINK], VIEW_SINK);
        step->program = run_with_sink;
    }
}

static attn_status make_views(attn_plan *plan, void *stream, struct attn_error *error)
{
    const attn_layer *layer = plan->steps[0].layer;
    uint32_t composed = layer->served[0].composed | layer->served[1].composed;
    bool cascade = false;
    attn_status status = ATTN_OK;
    plan->used_integers = 0;
    status = queries_split(plan, error);
    if (status != ATTN_OK) {
        return status;
    }
    plan->views[VIEW_WHOLE] = plan->given;
    if (composed & ATTN_COMPOSE_CHUNKED) {
        status = compose_chunks(plan, layer->desc, error);
    }
    if (status == ATTN_OK) {
        batch_split(plan, &plan->views[VIEW_WHOLE], threshold_of(plan));
    }
    if (status == ATTN_OK && layer->selected->mla != NULL) {
        status = mla_make_views(plan, error);
    }
    if (status == ATTN_OK && layer->selected->gdn != NULL) {
        status = gdn_make_views(plan, error);
    }
    if (status == ATTN_OK && layer_is_spread(layer) && layer->selected->mla == NULL) {
        status = parallel_make_views(plan, error);
    }
    if (status == ATTN_OK && composed & ATTN_COMPOSE_STATIC_SINK) {
        status = compose_sink(plan, layer->desc, error);
    }
    for (int32_t i = 0; i < plan->num_steps && !cascade; i++) {
        cascade = cascade_pays(plan, &plan->steps[i]);
    }
    if (status == ATTN_OK && cascade) {
        status = compose_cascade(plan, error);
    }
    return status == ATTN_OK ? compose_send(plan, stream, error) : status;
}

/* What a plan is made for. */
struct purpose {
    int32_t mode;     /* enum attn_plan_mode */
    bool tables_only; /* the vendors' last plans hold but for the tables */
};

static attn_status call_vendor(const struct schedule *schedule, const struct attn_attend_args *args,
                               const struct purpose *purpose, struct attn_error *error)
{
    const struct attn_kernels *kernels = &schedule->instance->kernels;
    bool updates = schedule->instance->caps->features & ATTN_FEATURE_UPDATE_BLOCK_TABLE;
    struct attn_error why = ATTN_ERROR_INIT;
    attn_status status = ATTN_OK;
    if (purpose->tables_only && updates && kernels->update_block_table != NULL) {
        status = kernels->update_block_table(args, &why);
    } else if (kernels->plan != NULL) {
        status = kernels->plan(args, purpose->mode, &why);
    }
    return status == ATTN_OK ? status : error_relay(error, status, &why);
}

static attn_status call_vendors(attn_plan *plan, const struct purpose *purpose, void *stream,
                                struct attn_error *error)
{
    attn_status status = ATTN_OK;
    for (int32_t i = 0; i < plan->num_schedules && status == ATTN_OK; i++) {
        struct schedule *schedule = &plan->schedules[i];
        if (schedule->view >= 0) {
            struct attn_attend_args args = *schedule->args;
            args.batch = &plan->views[schedule->view];
            args.stream = stream;
            status = call_vendor(schedule, &args, purpose, error);
        }
    }
    return status;
}

static attn_status make_plan(attn_plan *plan, const struct attn_batch *batch,
                             const struct purpose *purpose, void *stream, struct attn_error *error)
{
    attn_status status;
    plan->ready = NULL;
    plan->source = NULL;
    plan->serial++;
    if (plan->workspace == NULL && plan->scratch.bytes > 0) {
        return error_set(error, ATTN_ERROR_ORDER, "plan_bind_workspace",
                         "no workspace is bound; %zu bytes are needed", plan->scratch.bytes);
    }
    status = batch_read(plan, batch, error);
    if (status != ATTN_OK) {
        return status;
    }
    for (int32_t i = 0; i < plan->num_schedules; i++) {
        plan->schedules[i].view = -1;
    }
    bool empty = plan->given.mode == ATTN_BATCH_IDLE || plan->given.mode == ATTN_BATCH_PROFILE ||
                 plan->given.num_reqs == 0 ||
                 (plan->given.num_actual_tokens == 0 && queries_split_lens(plan) == NULL);
    plan->parallel.split = false;
    if (empty) {
        plan->split = (struct attn_batch_split){0, 0, 0, 0};
        for (int32_t i = 0; i < plan->num_steps; i++) {
            plan->steps[i].program = run_idle;
            plan->steps[i].enter = run_general;
        }
        plan->ready = plan->table;
        return ATTN_OK;
    }
    if (purpose->mode == ATTN_PLAN_CAPTURE || purpose->mode == ATTN_PLAN_REPLAY) {
        plan->given.flags |= ATTN_BATCH_IN_CAPTURE;
    }
    if (plan->validate) {
        status = validate_batch(plan, error);
    }
    status = status == ATTN_OK ? make_views(plan, stream, error) : status;
    if (status != ATTN_OK) {
        return status;
    }
    for (int32_t i = 0; i < plan->num_steps; i++) {
        choose_calls(plan, &plan->steps[i]);
        step_choose_entry(plan, &plan->steps[i]);
    }
    status = call_vendors(plan, purpose, stream, error);
    plan->ready = status == ATTN_OK ? plan->table : NULL;
    return status;
}

attn_status plan_batch(attn_plan *plan, const struct attn_batch *batch, void *stream,
                       struct attn_error *error)
{
    if (plan == NULL) {
        return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "plan", "plan is NULL");
    }
    return make_plan(plan, batch, &(struct purpose){ATTN_PLAN_EAGER, false}, stream, error);
}

attn_status plan_graph(attn_plan *plan, int32_t mode, const struct attn_batch *batch, void *stream,
                       struct attn_error *error)
{
    if (plan == NULL || mode < ATTN_PLAN_CAPTURE || mode > ATTN_PLAN_IN_GRAPH) {
        return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "mode",
                         "plan %p, mode %d; modes 1 to 4", (void *)plan, mode);
    }
    if (!plan->graph) {
        return error_set(error, ATTN_ERROR_ORDER, "graph",
                         "the plan was made without attn_plan_options.graph");
    }
    const struct purpose purpose = {mode, false};
    if (mode == ATTN_PLAN_IN_GRAPH) {
        return plan->ready != NULL ? call_vendors(plan, &purpose, stream, error)
                                   : error_set(error, ATTN_ERROR_ORDER, "mode",
                                               "IN_GRAPH comes after OUT_OF_GRAPH or CAPTURE");
    }
    struct captured *captured = &plan->captured;
    if (mode == ATTN_PLAN_REPLAY && !captured->there) {
        return error_set(error, ATTN_ERROR_ORDER, "mode", "REPLAY comes after CAPTURE");
    }
    attn_status status = make_plan(plan, batch, &purpose, stream, error);
    const struct captured now = {true, plan->given.num_reqs, plan->split.num_decodes,
                                 plan->given.num_tokens};
    if (status == ATTN_OK && mode == ATTN_PLAN_CAPTURE) {
        *captured = now;
    }
    if (status == ATTN_OK && mode == ATTN_PLAN_REPLAY &&
        (now.num_reqs != captured->num_reqs || now.num_decodes != captured->num_decodes ||
         now.num_tokens != captured->num_tokens)) {
        plan->ready = NULL;
        return error_set(
            error, ATTN_ERROR_INVALID_ARGUMENT, "num_reqs",
            "a replay with %d requests (%d decodes), %d tokens; captured were %d (%d), %d",
            now.num_reqs, now.num_decodes, now.num_tokens, captured->num_reqs,
            captured->num_decodes, captured->num_tokens);
    }
    return status;
}

/* The source's batch with other tables. A plan that was made from this very batch before (or is the
 * source itself) keeps its vendors' schedules where they can take new tables; else its kernels,
 * which differ, plan for themselves. */
attn_status plan_update_block_table(attn_plan *plan, const attn_plan *source,
                                    const struct attn_batch *tables, void *stream,
                                    struct attn_error *error)
{
    struct attn_batch batch, read;
    attn_status status;
    if (plan == NULL || source == NULL || source->ready == NULL) {
        return error_set(error, ATTN_ERROR_ORDER, "source",
                         "plan %p, source %p; the source has to be planned", (void *)plan,
                         (const void *)source);
    }
    status = struct_read(&read, sizeof read, 232, tables, "attn_batch", error);
    if (status != ATTN_OK) {
        return status;
    }
    bool same = plan == source || (plan->ready != NULL && plan->source == source &&
                                   plan->source_serial == source->serial);
    batch = source->received;
    batch.flags |= ATTN_BATCH_FAST_BUILD;
    batch.block_table = read.block_table;
    batch.block_table_stride = read.block_table_stride;
    batch.block_table_rows = read.block_table_rows;
    batch.block_table_row = read.block_table_row;
    batch.slot_mapping = read.slot_mapping;
    batch.num_slots = read.num_slots;
    status = make_plan(plan, &batch, &(struct purpose){ATTN_PLAN_EAGER, same}, stream, error);
    if (status == ATTN_OK && plan != source) {
        plan->source = source;
        plan->source_serial = source->serial;
    }
    return status;
}

attn_status plan_split(const attn_plan *plan, struct attn_batch_split *split)
{
    if (plan == NULL || split == NULL || plan->ready == NULL) {
        return ATTN_ERROR_ORDER;
    }
    *split = plan->split;
    return ATTN_OK;
}
