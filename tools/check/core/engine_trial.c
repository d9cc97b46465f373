/* SPDX-License-Identifier: Apache-2.0 */
/* One case run through the core and held to the reference, which runs it directly. */
#include <pthread.h>

#include "cases/attend.h"
#include "common/names.h"
#include "core/engine.h"
#include "cases/problem_copy.h"
#include "cases/problem.h"
#include "harness/watch.h"

const char *const engine_way_names[ENGINE_WAY_COUNT] = {
    "plain", "replanned", "two_plans", "table_update", "replay", "in_graph", "threads"};

/* A step under way. */
struct run {
    struct copy_step step; /* the first plan's */
    struct trial *trial;
    struct check_engine *engine;
    struct problem_copy *other; /* the second plan's, with memory of its own */
    uint32_t flags;             /* flags of the runs */
};

static attn_status plan_batch(const struct run *run, int32_t index, int32_t mode,
                              const struct problem_copy *copy, struct attn_error *error)
{
    const struct attn_api *api = run->engine->core->api;
    attn_plan *plan = run->engine->plans[index].plan;
    const struct attn_batch *batch = &copy->binding.batch;
    return mode == ATTN_PLAN_EAGER ? api->plan_batch(plan, batch, copy->stream, error)
                                   : api->plan_graph(plan, mode, batch, copy->stream, error);
}

static attn_status run_step(const struct run *run, int32_t index, struct problem_copy *copy,
                            struct attn_error *error)
{
    struct attn_step_io io = engine_io(copy);
    struct check_engine *engine = run->engine;
    io.flags = run->flags;
    return engine->core->api->run(engine->plans[index].plan, engine->layer, &io, error);
}

/* A run begins with its step. */
static attn_status plan_first(const struct copy_step *step, int32_t mode, struct attn_error *error)
{
    return plan_batch((const struct run *)(const void *)step, 0, mode, step->copy, error);
}

static attn_status run_first(const struct copy_step *step, struct attn_error *error)
{
    return run_step((const struct run *)(const void *)step, 0, step->copy, error);
}

/* Planned as it is, and run. */
static attn_status run_eager(const struct run *run, struct attn_error *error)
{
    attn_status status = plan_first(&run->step, ATTN_PLAN_EAGER, error);
    return status == ATTN_OK ? run_first(&run->step, error) : status;
}

/* Planned with tables that are wrong, then given the right ones: by itself, as a later group's plan
 * is given the earlier group's. */
static attn_status run_table_update(const struct run *run, struct attn_error *error)
{
    const struct attn_api *api = run->engine->core->api;
    struct problem_copy *copy = run->step.copy;
    struct attn_batch *batch = &copy->binding.batch;
    const struct attn_batch whole = *batch;
    batch->block_table = (const int32_t *)(copy->memory + run->step.copy->problem->at.other_table);
    batch->slot_mapping = (const int64_t *)(copy->memory + run->step.copy->problem->at.other_slots);
    attn_status status = plan_batch(run, 1, ATTN_PLAN_EAGER, copy, error);
    *batch = whole;
    if (status == ATTN_OK) {
        status = api->plan_update_block_table(
            run->engine->plans[0].plan, run->engine->plans[1].plan, batch, copy->stream, error);
    }
    return status == ATTN_OK ? run_step(run, 0, copy, error) : status;
}

static attn_status run_two_plans(const struct run *run, struct attn_error *error)
{
    attn_status status = plan_batch(run, 0, ATTN_PLAN_EAGER, run->step.copy, error);
    status =
        status == ATTN_OK ? plan_batch(run, 1, ATTN_PLAN_EAGER, run->step.copy, error) : status;
    status = status == ATTN_OK ? run_step(run, 0, run->step.copy, error) : status;
    return status == ATTN_OK ? run_step(run, 1, run->step.copy, error) : status;
}

struct planner {
    const struct run *run;
    struct problem_copy *copy;
    int32_t index;
    attn_status status;
    struct attn_error error;
};

static void *run_planner(void *argument)
{
    struct planner *planner = argument;
    for (int32_t i = 0; i < 3 && planner->status == ATTN_OK; i++) {
        planner->status = plan_batch(planner->run, planner->index, ATTN_PLAN_EAGER, planner->copy,
                                     &planner->error);
        if (planner->status == ATTN_OK) {
            planner->status =
                run_step(planner->run, planner->index, planner->copy, &planner->error);
        }
    }
    return NULL;
}

/* Both threads attend to one cache, which a step before them wrote: two may not write the same rows
 * at once. */
static attn_status run_threads(const struct run *run, struct attn_error *error)
{
    struct run reading = *run;
    reading.flags |= ATTN_RUN_NO_WRITE;
    struct planner planners[2] = {{&reading, run->step.copy, 0, ATTN_OK, ATTN_ERROR_INIT},
                                  {&reading, run->other, 1, ATTN_OK, ATTN_ERROR_INIT}};
    pthread_t thread;
    attn_status status = run_eager(run, error);
    if (status != ATTN_OK) {
        return status;
    }
    if (pthread_create(&thread, NULL, run_planner, &planners[1]) != 0) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    run_planner(&planners[0]);
    pthread_join(thread, NULL);
    int32_t failed = planners[0].status != ATTN_OK ? 0 : 1;
    *error = planners[failed].error;
    return planners[failed].status;
}

static attn_status run_way(const struct run *run, int32_t way, struct attn_error *error)
{
    attn_status status = ATTN_OK;
    switch (way) {
    case ENGINE_REPLAY:
    case ENGINE_IN_GRAPH:
        return copy_step_captured(&run->step, way == ENGINE_IN_GRAPH, error);
    case ENGINE_TABLE_UPDATE:
        return run_table_update(run, error);
    case ENGINE_TWO_PLANS:
        return run_two_plans(run, error);
    case ENGINE_THREADS:
        return run_threads(run, error);
    case ENGINE_REPLANNED:
        status = copy_step_plan_shorter(&run->step, ATTN_PLAN_EAGER, error);
        break;
    default:
        break;
    }
    return status == ATTN_OK ? run_eager(run, error) : status;
}

/* A whole step again: nothing of the engine's allocator or the heap may go. */
static enum trial_result count_step(const struct run *run)
{
    struct attn_error error = ATTN_ERROR_INIT;
    struct watch watch;
    watch_begin(&watch);
    TRIAL_CALL(run->trial, "the step again", run_eager(run, &error), &error);
    return watch_allocated(&watch, run->trial->tested, run->trial->message,
                           sizeof run->trial->message)
               ? TRIAL_FAILED
               : TRIAL_PASSED;
}

/* In a quantized cache few codes may lie one step off. So its keys are written by a run of their
 * own, compared, and replaced by the reference's before the run that attends. */
static enum trial_result write_keys(struct run *run, const struct problem_copy *reference)
{
    const struct check_problem *p = run->step.copy->problem;
    struct attn_error error = ATTN_ERROR_INIT;
    bool fused =
        run->engine->core->caps->features & ATTN_FEATURE_FUSED_WRITE || p->v[FACTOR_WRITE].a;
    if (!p->paged || p->v[FACTOR_KV_DTYPE].a <= ATTN_KV_F32 || fused) {
        return TRIAL_PASSED; /* there is nothing to compare apart */
    }
    run->flags = ATTN_RUN_NO_ATTEND;
    TRIAL_CALL(run->trial, "a run that only writes", run_eager(run, &error), &error);
    run->flags = ATTN_RUN_NO_WRITE;
    return verify_written_keys(run->trial, reference, run->step.copy);
}

/* The way itself, or ENGINE_PLAIN where the layer does not promise it. */
static int32_t way_of_layer(const struct check_engine *engine, const struct check_problem *p,
                            int32_t way)
{
    const struct attn_api *api = engine->core->api;
    int32_t level = api->plan_graph_level(engine->plans[0].plan);
    bool graph = way == ENGINE_REPLAY || way == ENGINE_IN_GRAPH;
    if ((graph && level < trial_graph_level(p->shape)) ||
        (way == ENGINE_TABLE_UPDATE && !p->paged)) {
        return ENGINE_PLAIN;
    }
    return way;
}

static enum trial_result run_engine(struct run *run, const struct problem_copy *reference,
                                    int32_t way)
{
    struct attn_error error = ATTN_ERROR_INIT;
    struct check_engine *engine = run->engine;
    const struct problem_copy *copy = run->step.copy;
    bool graph = way == ENGINE_REPLAY || way == ENGINE_IN_GRAPH;
    TRIAL_CALL(run->trial, "bind", engine_bind(engine, copy, &error), &error);
    attn_status status = engine_add_plan(engine, 0, copy, graph, &error);
    if (graph && status == ATTN_ERROR_UNSUPPORTED) { /* its level is never */
        way = ENGINE_PLAIN;
        status = engine_add_plan(engine, 0, copy, false, &error);
    }
    TRIAL_CALL(run->trial, "bind", status, &error);
    TRIAL_CALL(run->trial, "bind", engine_add_plan(engine, 1, copy, false, &error), &error);
    TRIAL_TRY(write_keys(run, reference));
    TRIAL_CALL(run->trial, "step",
               run_way(run, way_of_layer(engine, run->step.copy->problem, way), &error), &error);
    TRIAL_TRY(verify_step(run->trial, reference, run->step.copy));
    TRIAL_FAIL_IF(run->trial, !engine_guards_whole(engine),
                  "the workspace was written past its size");
    return way != ENGINE_THREADS ? count_step(run) : TRIAL_PASSED;
}

enum trial_result engine_trial(struct trial *trial, const struct case_space *space,
                               const struct attend_case *attend_case, uint64_t seed, int32_t way)
{
    struct attn_error error = ATTN_ERROR_INIT;
    OWNED(problem_copies_finish) struct problem_copies copies;
    OWNED(problem_copy_finish) struct problem_copy other = {.device = trial->device};
    OWNED(engine_finish)
    struct check_engine engine = {.core = trial->core, .device = trial->device};
    struct run run = {{&copies.tested, plan_first, run_first}, trial, &engine, &other, 0};
    TRIAL_TRY(problem_copies_init(&copies, trial, space, attend_case, seed));
    TRIAL_FAIL_IF(trial, !problem_copy_init(&other, trial->tested, trial->device, &copies.problem),
                  "no memory for the case");
    struct binding *binding = &copies.tested.binding;
    output_bind(&copies.problem, &binding->output, &binding->layer, &binding->attend,
                copies.tested.memory, trial->device->device);
    problem_copy_loosen(&copies.tested);
    problem_copy_loosen(&other);
    attn_status status = problem_copy_run_reference(&copies.reference, &error);
    return status == ATTN_OK ? run_engine(&run, &copies.reference, way)
                             : trial_call_failed(trial, "reference", status, &error);
}

/* Whether the core serves the case's layer with the backend ordered; `user` is the trial. */
static bool engine_serves(void *user, const struct factor_value *v)
{
    struct trial *trial = user;
    struct attn_layer_desc layer;
    case_layer(v, &layer);
    return trial_supports(trial, trial->reference, &layer, case_phase(v)) &&
           core_serves(trial->core, &layer);
}

void engine_space_init(struct case_space *space, struct trial *trial)
{
    struct attn_backend_caps composed = trial->tested->caps;
    composed.terms |= ATTN_TERM_CHUNKED_LOCAL | ATTN_TERM_STATIC_SINK;
    composed.layer_kinds |= UINT64_C(1) << ATTN_LAYER_ENCODER;
    composed.num_refused = 0;                /* the core knows them */
    (void)case_space_init(space, &composed); /* what is declared, and more */
    space->serves = engine_serves;
    space->user = trial;
}

/* Steps with a common prefix and quantized outputs. Here it always pays to attend the prefix apart,
 * so the core merges both attends and quantizes the result. */
static enum trial_result run_output(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct attend_variant *v = variant;
    return engine_trial(trial, v->space, &v->attend_case, seed, ENGINE_PLAIN);
}

void engine_output_cases(const struct kernel_sink *sink)
{
    const uint64_t kernels = ATTN_KERNEL_QUANTIZE | ATTN_KERNEL_MERGE_STATES;
    const struct attn_backend_caps *caps = sink->caps;
    if ((caps->kernels & kernels) != kernels || !(caps->features & ATTN_FEATURE_LSE)) {
        return; /* the core composes neither of the backend */
    }
    for (int32_t i = 0; i < CASE_OUTPUTS; i++) {
        struct attend_variant c = {.space = sink->space};
        const int32_t dtype = ATTN_DTYPE_F16 + i % 3;
        char form[64];
        if (!case_of_cache(sink->space, dtype, dtype, &c.attend_case) ||
            !case_set(sink->space, &c.attend_case, FACTOR_SHAPE, SHAPE_SHARED) ||
            case_value(sink->space, &c.attend_case, FACTOR_CAUSAL).a != CAUSAL_YES ||
            case_refused(sink->space, &c.attend_case)) {
            continue;
        }
        c.attend_case.output = case_outputs[i];
        case_output_name(&case_outputs[i], form, sizeof form);
        kernel_try(sink, run_output, &c, "engine_output.%s.shared.%s", form, dtype_name(dtype));
    }
}
