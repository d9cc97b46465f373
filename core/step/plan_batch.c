/* SPDX-License-Identifier: Apache-2.0 */
/* Planning a batch: which calls this batch takes, over which view of it, and the vendors' own
 * schedules. */
#include <stdatomic.h>

#include "step/plan_state.h"

/* Numbers of successful and failed plan_batches of this process: none comes twice, so that a plan
 * at the address of one that is gone is not taken for it. */
static atomic_uint_fast64_t num_planned;

bool step_takes_whole(const struct step *step)
{
    const struct served *served = step->layer->served;
    const bool mixed = served[0].instance->caps->features & ATTN_FEATURE_MIXED_BATCH;
    return step->keys_are_inputs || (served[0].instance == served[1].instance &&
                                     (mixed || step->layer->selected->has_states));
}

step_program *step_attends(attn_plan *plan, struct step *step)
{
    struct launch *prefill = &step->launches[ATTN_PHASE_PREFILL][PART_MAIN];
    struct launch *decode = &step->launches[ATTN_PHASE_DECODE][PART_MAIN];
    int32_t calls = 0;
    if (step->program != NULL) {
        return step->program;
    }
    step->program = plan->given.num_actual_tokens > 0 ? run_attends : run_nothing;
    if (step->program == run_attends && step_takes_whole(step)) {
        bool all_decode = plan->split.num_prefills == 0 && !step->keys_are_inputs;
        step->main[0] = launch_use(all_decode ? decode : prefill, &plan->whole);
    } else if (step->program == run_attends) {
        if (plan->split.num_decodes > 0) {
            step->main[calls++] = launch_use(decode, &plan->decode);
        }
        if (plan->split.num_prefills > 0) {
            step->main[calls++] = launch_use(prefill, &plan->prefill);
        }
    }
    return step->program;
}

static void choose_calls(attn_plan *plan, struct step *step)
{
    /* query_start_loc may begin above 0 */
    bool rows = plan->split.num_decode_tokens + plan->split.num_prefill_tokens > 0 ||
                plan->all_query_lens != NULL;
    step->main[0] = step->main[1] = NULL;
    step->bring_keys = NULL;
    step->program = rows ? NULL : run_nothing;
    FOR_COMPOSED(c, step->layer->composed_by) {
        if ((*c)->choose != NULL) {
            (*c)->choose(plan, step);
        }
    }
    step_attends(plan, step);
}

/* What run() enters, after the program and its calls are chosen. */
static void step_choose_entry(attn_plan *plan, struct step *step)
{
    const struct attn_layer_desc *layer = step->layer->desc;
    bool one_call = step->program == run_attends && step->main[0] != NULL && step->main[1] == NULL;
    bool writes = step->writes && plan->given.num_slots > 0;
    bool decodes =
        step->main[0] == &step->launches[ATTN_PHASE_DECODE][PART_MAIN] && step->main[1] == NULL;
    step->fuses = step->fused_write || (step->fused_decode && decodes);
    for (int32_t i = 0; i < 2 && step->main[i] != NULL; i++) { /* what the vendors' plans see */
        step->main[i]->args.flags = step->fuses && writes ? 0 : ATTN_RUN_NO_WRITE;
    }
    step->drops_keys = step->writes && !writes && plan->given.num_actual_tokens > 0;
    step->plain_writes = writes;
    step->write.slot_mapping = plan->given.slot_mapping;
    step->write.num_slots = plan->given.num_slots;
    /* a cross layer's keys come with the first step only */
    bool plain = one_call && step->bring_keys == NULL && step->check_io == step_check_plain &&
                 layer->output_form == ATTN_OUTPUT_PLAIN && !step->keys_are_inputs &&
                 step->check_more == NULL && layer->kind != ATTN_LAYER_CROSS && !plan->validate &&
                 (!writes || step->fuses || step->write_kv != NULL);
    step->enter = plain ? run_plain : run_general;
}

void view_starts(const attn_plan *plan, struct attn_batch *view, const int32_t *start)
{
    view->query_start_loc_host = start;
    view->query_start_loc = plan_on_device(plan, start);
}

void view_lens(const attn_plan *plan, struct attn_batch *view, const int32_t *lens)
{
    view->seq_lens_host = lens;
    view->seq_lens = plan_on_device(plan, lens);
    view->max_seq_len = 0;
    for (int32_t r = 0; r < view->num_reqs; r++) {
        view->max_seq_len = lens[r] > view->max_seq_len ? lens[r] : view->max_seq_len;
    }
}

int32_t view_pieces(const attn_plan *plan, int32_t tokens)
{
    const int64_t most = 2 * plan->max_reqs + plan->limits.max_num_tokens / tokens;
    return most < INT32_MAX ? (int32_t)most : INT32_MAX;
}

struct view_requests view_begin(attn_plan *plan, int64_t most, int32_t first_row)
{
    struct view_requests requests = {.start = plan_take(plan, most + 1)};
    requests.lens = plan_take(plan, most);
    requests.table_rows = plan_take(plan, most);
    requests.start[0] = first_row;
    return requests;
}

void view_end(const attn_plan *plan, const struct view_requests *requests, bool rows,
              struct attn_batch *view)
{
    view->num_reqs = requests->count;
    view_starts(plan, view, requests->start);
    view_lens(plan, view, requests->lens);
    if (rows) {
        view->block_table_row = plan_on_device(plan, requests->table_rows);
    }
}

void view_keys(const attn_plan *plan, struct attn_batch *view, const int32_t *start)
{
    view->key_start_loc_host = start;
    view->key_start_loc = start != NULL ? plan_on_device(plan, start) : NULL;
    view->seq_lens = view->seq_lens_host = NULL;
    view->block_table = view->block_table_row = NULL;
}

void view_sees_all(struct attn_batch *view)
{
    view->causal = ATTN_CAUSAL_DEFAULT;
    view->causal_per_request = NULL;
    view->tree = NULL;
    view->spans = view->span_start_loc = NULL;
    view->num_spans = 0;
    view->slot_mapping = NULL;
    view->num_slots = 0;
}

static attn_status send_host_ints(attn_plan *plan, void *stream, struct attn_error *error)
{
    const struct instance *instance = plan->steps[0].layer->served[ATTN_PHASE_DECODE].instance;
    size_t bytes = (size_t)plan->used_host_ints * sizeof *plan->host_ints;
    if (bytes == 0) {
        return ATTN_OK;
    }
    ERROR_IF(instance->kernels.copy == NULL, ATTN_ERROR_UNSUPPORTED, "copy",
             "%s has no copy kernel, which a composed step needs", instance->caps->name);
    const struct attn_copy_args args =
        KERNEL_ARGS(instance, stream, .destination = plan->workspace, .source = plan->host_ints,
                    .bytes = bytes, .kind = ATTN_COPY_HOST_TO_DEVICE);
    return instance->kernels.copy(&args, error);
}

static attn_status make_views(attn_plan *plan, void *stream, struct attn_error *error)
{
    plan->used_host_ints = 0;
    TRY(block_tables_make(plan, stream, error));
    plan->whole = plan->given;
    FOR_COMPOSED(c, plan->composed_by) {
        TRY_IF((*c)->view != NULL, (*c)->view(plan, error));
    }
    batch_split(plan);
    FOR_COMPOSED(c, plan->composed_by) {
        TRY_IF((*c)->view_split != NULL, (*c)->view_split(plan, error));
    }
    return send_host_ints(plan, stream, error);
}

/* `tables_only`: the vendors' last plans hold but for the tables. */
static attn_status call_vendor(const struct plan_schedule *schedule,
                               const struct attn_attend_args *args, int32_t mode, bool tables_only,
                               struct attn_error *error)
{
    const struct attn_kernels *kernels = &schedule->instance->kernels;
    bool updates = schedule->instance->caps->features & ATTN_FEATURE_UPDATE_BLOCK_TABLE;
    struct attn_error why = ATTN_ERROR_INIT;
    attn_status status = ATTN_OK;
    if (tables_only && updates && kernels->update_block_table != NULL) {
        status = kernels->update_block_table(args, &why);
    } else if (kernels->schedule != NULL) {
        status = kernels->schedule(args, mode, &why);
    }
    return error_relay(error, status, &why);
}

static attn_status call_vendors(attn_plan *plan, int32_t mode, bool tables_only, void *stream,
                                struct attn_error *error)
{
    for (int32_t i = 0; i < plan->num_schedules; i++) {
        struct plan_schedule *schedule = &plan->schedules[i];
        if (schedule->batch != NULL) {
            struct attn_attend_args args = *schedule->args;
            args.batch = schedule->batch;
            args.stream = stream;
            args.q = args.k = args.v = args.out = args.lse = NULL; /* the last run's */
            TRY(call_vendor(schedule, &args, mode, tables_only, error));
        }
    }
    return ATTN_OK;
}

static attn_status plan_steps(attn_plan *plan, const struct attn_batch *batch, int32_t mode,
                              bool tables_only, void *stream, struct attn_error *error)
{
    plan->ready = NULL;
    plan->source = NULL;
    plan->serial = atomic_fetch_add_explicit(&num_planned, 1, memory_order_relaxed) + 1;
    plan->mode = mode;
    plan->stream = stream;
    if (plan->workspace == NULL) { /* which every plan needs some of */
        return error_set(error, ATTN_ERROR_ORDER, "plan_bind_workspace",
                         "no workspace is bound; %zu bytes are needed",
                         plan->layout.own_bytes + plan->layout.scratch_bytes);
    }
    TRY(batch_read(plan, batch, error));
    for (int32_t i = 0; i < plan->num_schedules; i++) {
        plan->schedules[i].batch = NULL;
    }
    bool empty = plan->given.mode == ATTN_BATCH_IDLE || plan->given.mode == ATTN_BATCH_PROFILE ||
                 plan->given.num_reqs == 0 ||
                 (plan->given.num_actual_tokens == 0 && plan->all_query_lens == NULL);
    if (empty) {
        plan->split = (struct attn_batch_split){.struct_size = sizeof plan->split};
        for (int32_t i = 0; i < plan->num_steps; i++) {
            plan->steps[i].program = run_idle;
            plan->steps[i].enter = run_general;
            plan->steps[i].bring_keys = NULL;
            plan->steps[i].drops_keys = false;
        }
        plan->ready = plan->table;
        return ATTN_OK;
    }
    if (mode == ATTN_PLAN_CAPTURE || mode == ATTN_PLAN_REPLAY) {
        plan->given.flags |= ATTN_BATCH_IN_CAPTURE;
    }
    TRY_IF(plan->looks, validate_batch(plan, error));
    TRY(make_views(plan, stream, error));
    for (int32_t i = 0; i < plan->num_steps; i++) {
        choose_calls(plan, &plan->steps[i]);
        step_choose_entry(plan, &plan->steps[i]);
    }
    attn_status status = call_vendors(plan, mode, tables_only, stream, error);
    status = plan->validate ? wait_for_device_errors(plan, stream, status, error) : status;
    plan->ready = status == ATTN_OK ? plan->table : NULL;
    return status;
}

attn_status plan_batch(attn_plan *plan, const struct attn_batch *batch, void *stream,
                       struct attn_error *error)
{
    BAD_IF(plan == NULL, "plan", "plan is NULL");
    plan->capturing = false;
    return plan_steps(plan, batch, ATTN_PLAN_EAGER, false, stream, error);
}

attn_status plan_graph(attn_plan *plan, int32_t mode, const struct attn_batch *batch, void *stream,
                       struct attn_error *error)
{
    BAD_IF(plan == NULL || mode < ATTN_PLAN_CAPTURE || mode > ATTN_PLAN_IN_GRAPH, "mode",
           "plan %p, mode %d; modes 1 to 4", (void *)plan, mode);
    ERROR_IF(!plan->graph, ATTN_ERROR_ORDER, "graph",
             "the plan was made without attn_plan_options.graph");
    if (mode == ATTN_PLAN_IN_GRAPH) {
        const bool begun = plan->mode == ATTN_PLAN_CAPTURE || plan->mode == ATTN_PLAN_OUT_OF_GRAPH;
        ERROR_IF(plan->ready == NULL || !begun, ATTN_ERROR_ORDER, "mode",
                 "IN_GRAPH comes after OUT_OF_GRAPH or CAPTURE");
        plan->capturing = true;
        plan->stream = stream;
        return call_vendors(plan, mode, false, stream, error);
    }
    struct captured *captured = &plan->captured;
    ERROR_IF(mode == ATTN_PLAN_REPLAY && !captured->there, ATTN_ERROR_ORDER, "mode",
             "REPLAY comes after CAPTURE");
    plan->capturing = mode == ATTN_PLAN_CAPTURE;
    attn_status status = plan_steps(plan, batch, mode, false, stream, error);
    const struct captured now = {true,
                                 plan->given.num_reqs,
                                 plan->split.num_decodes,
                                 plan->given.num_tokens,
                                 plan->first_row,
                                 plan->given.num_actual_tokens,
                                 plan->steps[0].program == run_idle};
    if (status == ATTN_OK && mode == ATTN_PLAN_CAPTURE) {
        *captured = now;
    }
    if (status == ATTN_OK && mode == ATTN_PLAN_REPLAY &&
        (now.num_reqs != captured->num_reqs || now.num_decodes != captured->num_decodes ||
         now.num_tokens != captured->num_tokens || now.idle != captured->idle)) {
        plan->ready = NULL;
        return BAD("num_reqs",
                   "a replay with %d requests (%d decodes), %d tokens%s; captured were %d (%d), "
                   "%d%s",
                   now.num_reqs, now.num_decodes, now.num_tokens, now.idle ? ", none attended" : "",
                   captured->num_reqs, captured->num_decodes, captured->num_tokens,
                   captured->idle ? ", none attended" : "");
    }
    if (status == ATTN_OK && mode == ATTN_PLAN_REPLAY &&
        (now.first_row != captured->first_row ||
         now.num_actual_tokens > captured->num_actual_tokens)) {
        plan->ready = NULL;
        return BAD("num_actual_tokens",
                   "a replay of rows %d to %d; captured were rows %d to %d, and a replay has the "
                   "first of these and no more",
                   now.first_row, now.num_actual_tokens - 1, captured->first_row,
                   captured->num_actual_tokens - 1);
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
    ERROR_IF(plan == NULL || source == NULL || source->ready == NULL, ATTN_ERROR_ORDER, "source",
             "plan %p, source %p; the source has to be planned", (void *)plan,
             (const void *)source);
    TRY(struct_read(&read, ABI_BATCH, tables, error));
    bool same = plan == source || (plan->ready != NULL && plan->source == source &&
                                   plan->source_serial == source->serial);
    batch = source->received;
    /* lengths that come with the tables are new as well, and schedules are made of them */
    same =
        same && batch.last_page_len == NULL && read.last_page_len == NULL && plan->num_tables == 0;
    batch.flags |= ATTN_BATCH_FAST_BUILD;
    struct attn_batch_table own = own_table(&read);
    own.seq_lens = batch.seq_lens;
    own.seq_lens_host = batch.seq_lens_host;
    own.max_seq_len = batch.max_seq_len;
    own_table_put(&batch, &own);
    batch.tables = read.tables;
    batch.num_tables = read.num_tables;
    batch.table_stride = read.table_stride;
    TRY(plan_steps(plan, &batch, ATTN_PLAN_EAGER, same, stream, error));
    if (plan != source) {
        plan->source = source;
        plan->source_serial = source->serial;
    }
    return ATTN_OK;
}

attn_status plan_split(const attn_plan *plan, struct attn_batch_split *split)
{
    if (plan == NULL || split == NULL || plan->ready == NULL) {
        return ATTN_ERROR_ORDER;
    }
    return struct_write(split, &plan->split, ABI_BATCH_SPLIT);
}
