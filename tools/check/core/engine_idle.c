/* SPDX-License-Identifier: Apache-2.0 */
/* Steps without work: idle ones, those whose batch holds no query, and the one by which an engine
 * measures its memory. Each leaves the same bytes as cpu_ref, and the next step is right. */
#include <stdlib.h>
#include <string.h>

#include "common/names.h"
#include "support/client.h"
#include "support/number.h"
#include "core/engine.h"
#include "cases/problem_copy.h"

#define PAGE 4096

static const struct idle_way {
    const char *name;
    int32_t mode;
    bool zeros;    /* out becomes zero; else it stays as it is */
    bool requests; /* the batch has them, of no query each */
} ways[] = {
    {"idle", ATTN_BATCH_IDLE, true, true},
    {"no_requests", ATTN_BATCH_AUTO, false, false},
    {"no_queries", ATTN_BATCH_AUTO, false, true},
    {"profile", ATTN_BATCH_PROFILE, true, false},
};

struct idle_case {
    const struct case_space *space;
    struct attend_case attend_case;
    const struct idle_way *way;
};

/* A problem in a core, served by one backend. */
struct idle_run {
    struct problem_copy *copy;
    struct check_engine *engine;
};

/* The step's batch without its queries. `none` is both copies of query_start_loc. */
static attn_status plan_idle(const struct idle_run *run, const struct idle_way *way,
                             const int32_t *none_host, const int32_t *none,
                             struct attn_error *error)
{
    const struct attn_batch *whole = &run->copy->binding.batch;
    struct attn_batch batch = SIZED(attn_batch, .mode = way->mode, .num_tokens = whole->num_tokens);
    if (way->requests) {
        batch = *whole;
        batch.mode = way->mode;
        batch.num_actual_tokens = 0;
        batch.num_slots = 0;
        batch.query_start_loc = none;
        batch.query_start_loc_host = none_host;
    } else if (way->mode == ATTN_BATCH_AUTO) {
        batch.query_start_loc = none;
        batch.query_start_loc_host = none_host;
        batch.seq_lens = whole->seq_lens;
        batch.block_table = whole->block_table;
        batch.block_table_stride = whole->block_table_stride;
    }
    return run->engine->core->api->plan_batch(run->engine->plans[0].plan, &batch, run->copy->stream,
                                              error);
}

static attn_status run_idle(const struct idle_run *run, const struct idle_way *way,
                            struct attn_error *error)
{
    static const int32_t none[PROBLEM_MAX_REQS + 1] = {0};
    const struct device *device = run->copy->device;
    const struct attn_step_io io = engine_io(run->copy);
    int32_t *starts = device_alloc(device, sizeof none);
    attn_status status = starts != NULL && device_write(device, starts, none, sizeof none)
                             ? ATTN_OK
                             : ATTN_ERROR_OUT_OF_MEMORY;
    status = status == ATTN_OK ? plan_idle(run, way, none, starts, error) : status;
    if (status == ATTN_OK) {
        status =
            run->engine->core->api->run(run->engine->plans[0].plan, run->engine->layer, &io, error);
    }
    device_wait(device);
    device_free(device, starts);
    return status;
}

static attn_status open_engine(const struct idle_run *run, struct attn_error *error)
{
    attn_status status = engine_bind(run->engine, run->copy, error);
    return status == ATTN_OK ? engine_add_plan(run->engine, 0, run->copy, false, error) : status;
}

/* Out is zero, or as before: its rows of heads, and nothing between them. */
static bool out_holds(const struct problem_copy *copy, bool zeros, const uint8_t *found)
{
    const struct check_problem *problem = copy->problem;
    const struct attn_tensor *out = &copy->binding.out;
    size_t e = number_bytes(problem->dtype), row = (size_t)out->strides[0] * e;
    size_t used = (size_t)(out->shape[1] * out->shape[2]) * e;
    const uint8_t *initial = problem->image.bytes + problem->at.out;
    found += problem->at.out;
    for (int64_t t = 0; t < out->shape[0]; t++, initial += row, found += row) {
        for (size_t i = 0; i < row; i++) {
            if (found[i] != (zeros && i < used ? 0 : initial[i])) {
                return false;
            }
        }
    }
    return true;
}

/* What is promised of a profiling step: no page of the workspace is left untouched. */
static bool workspace_touched(struct trial *trial, const struct check_engine *engine)
{
    const struct engine_plan *plan = &engine->plans[0];
    uint8_t *found = trial_read(trial, engine->device, plan->workspace, plan->bytes);
    bool touched = found != NULL;
    for (size_t at = 0; touched && at < plan->bytes; at += PAGE) {
        const size_t size = at + PAGE < plan->bytes ? PAGE : plan->bytes - at;
        touched = !is_poison(found + at, (int64_t)size);
    }
    free(found);
    return touched;
}

static enum trial_result verify_idle(struct trial *trial, const struct idle_way *way,
                                     const struct problem_copy *reference,
                                     const struct idle_run *tested)
{
    const struct check_problem *problem = tested->copy->problem;
    size_t cache = problem->at.cache, bytes = problem->at.cache_end - cache;
    size_t size = problem->image.size, lse = problem->at.lse;
    OWNED(memory_end)
    uint8_t *found = trial_read(trial, tested->copy->device, tested->copy->memory, size);
    if (found == NULL) {
        return TRIAL_FAILED;
    }
    TRIAL_FAIL_IF(trial,
                  image_stray_write(&problem->image, found) >= 0 ||
                      memcmp(found + cache, problem->image.bytes + cache, bytes) != 0,
                  "bytes outside of out were written");
    TRIAL_FAIL_IF(trial, !out_holds(tested->copy, way->zeros, found), "out is not %s",
                  way->zeros ? "zero in its rows alone" : "as it was");
    /* nothing is promised about lse */
    TRIAL_FAIL_IF(trial, memcmp(found, reference->memory, lse) != 0,
                  "out is not what cpu_ref leaves");
    TRIAL_FAIL_IF(trial, !engine_guards_whole(tested->engine),
                  "the workspace was written past its size");
    TRIAL_FAIL_IF(trial,
                  way->mode == ATTN_BATCH_PROFILE && !workspace_touched(trial, tested->engine),
                  "a page of the workspace was not touched");
    return TRIAL_PASSED;
}

/* The step itself, after the one without work. */
static enum trial_result run_usual(struct trial *trial, struct problem_copy *reference,
                                   const struct idle_run *tested)
{
    const struct check_problem *problem = tested->copy->problem;
    struct attn_error error = ATTN_ERROR_INIT;
    const struct attn_api *api = tested->engine->core->api;
    const struct attn_step_io io = engine_io(tested->copy);
    attn_plan *plan = tested->engine->plans[0].plan;
    memcpy(reference->memory, problem->image.bytes, problem->image.size);
    TRIAL_FAIL_IF(trial,
                  !device_write(tested->copy->device, tested->copy->memory, problem->image.bytes,
                                problem->image.size),
                  "the case cannot be written");
    TRIAL_CALL(trial, "reference", problem_copy_run_reference(reference, &error), &error);
    TRIAL_CALL(trial, "the step afterwards",
               api->plan_batch(plan, &tested->copy->binding.batch, tested->copy->stream, &error),
               &error);
    TRIAL_CALL(trial, "the step afterwards", api->run(plan, tested->engine->layer, &io, &error),
               &error);
    return verify_step(trial, reference, tested->copy);
}

static enum trial_result run_case(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct idle_case *c = variant;
    struct core as_reference = core_of_reference(trial->core);
    OWNED(problem_copies_finish) struct problem_copies copies;
    OWNED(engine_finish)
    struct check_engine of_reference = {.core = &as_reference}, tested = {.core = trial->core};
    const struct idle_run runs[2] = {{&copies.reference, &of_reference}, {&copies.tested, &tested}};
    struct attn_error error = ATTN_ERROR_INIT;
    TRIAL_TRY(problem_copies_init(&copies, trial, c->space, &c->attend_case, seed));
    for (int32_t i = 0; i < 2; i++) {
        TRIAL_CALL(trial, "a step without work", open_engine(&runs[i], &error), &error);
        TRIAL_CALL(trial, "a step without work", run_idle(&runs[i], c->way, &error), &error);
    }
    TRIAL_TRY(verify_idle(trial, c->way, &copies.reference, &runs[1]));
    return run_usual(trial, &copies.reference, &runs[1]);
}

static void try_ways(const struct kernel_sink *sink, struct idle_case *c, const char *keys,
                     int32_t dtype)
{
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        c->way = &ways[i];
        kernel_try(sink, run_case, c, "idle.%s.%s.%s", keys, dtype_name(dtype), ways[i].name);
    }
}

/* Bidirectional layers without a cache, of the first kind that the core serves. */
static bool case_of_encoder(const struct case_space *space, int32_t dtype, struct attend_case *c)
{
    *c = (struct attend_case){{0}};
    bool there = case_set(space, c, FACTOR_SHAPE, SHAPE_CONTIGUOUS) &&
                 case_set(space, c, FACTOR_DTYPE, dtype) &&
                 case_set(space, c, FACTOR_CAUSAL, CAUSAL_NO);
    for (int32_t kind = 0; there && kind < space->factors[FACTOR_ENCODER].count; kind++) {
        c->index[FACTOR_ENCODER] = kind;
        case_drop_conflicts(space, c);
        if (!case_refused(space, c)) {
            return true;
        }
    }
    return false;
}

void idle_cases(const struct kernel_sink *sink)
{
    const struct attn_backend_caps *caps = sink->caps;
    if (caps->device.type != ATTN_DEVICE_CPU && !(caps->kernels & ATTN_KERNEL_FILL)) {
        return; /* where memory is not the host's the core zeroes with it */
    }
    for (int32_t dtype = ATTN_DTYPE_F16; dtype <= ATTN_DTYPE_F32; dtype++) {
        struct idle_case c = {.space = sink->space};
        if (case_of_cache(sink->space, dtype, dtype, &c.attend_case)) {
            case_set(sink->space, &c.attend_case, FACTOR_STRIDES, 1); /* slices of wider rows */
            try_ways(sink, &c, "cache", dtype);
        }
        if (case_of_encoder(sink->space, dtype, &c.attend_case)) {
            try_ways(sink, &c, "encoder", dtype);
        }
    }
}
