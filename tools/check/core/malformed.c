/* SPDX-License-Identifier: Apache-2.0 */
/* Malformed arguments, one at a time, where everything else is right: an error that names the
 * field, and afterwards the step as it should be. */
#include <stdio.h>
#include <string.h>

#include "cases/hold.h"
#include "core/malformed.h"
#include "core/core_cases.h"

attn_status malformed_plan(struct malformed_step *s, const struct attn_batch *batch)
{
    const struct engine *e = s->engine;
    return e->core->api->plan_batch(e->plans[0].plan, batch, s->side->stream, &s->error);
}

struct malformed_case {
    struct core *core;
    const struct case_space *space;
    struct attend_case attend_case;
    const struct malformed *malformed;
};

/* Bound and planned; then the malformed call; then the step itself. */
static enum trial_result try_malformed(struct trial *trial, const struct malformed_case *c,
                                       struct problem *problem, const struct side *reference,
                                       struct side *tested, struct engine *engine)
{
    struct malformed_step s = {.engine = engine, .problem = problem, .side = tested};
    struct attn_error *error = &s.error;
    const struct attn_api *api = c->core->api;
    const struct binding *b = &tested->binding;
    *error = (struct attn_error)ATTN_ERROR_INIT;
    attn_status status = engine_bind(engine, c->core, trial->device, b, error);
    status = status == ATTN_OK ? engine_add_plan(engine, 0, problem, b, false, error) : status;
    status = status == ATTN_OK ? malformed_plan(&s, &b->batch) : status;
    if (status != ATTN_OK) {
        return trial_call_failed(trial, "the plan", status, error);
    }
    s.io = engine_io(problem, tested);
    status = c->malformed->make_wrong(&s);
    if (status == ATTN_OK) {
        return trial_say(trial, TRIAL_FAILED, "was not refused");
    }
    if (strcmp(error->field, c->malformed->field) != 0 || error->message[0] == '\0') {
        return trial_say(trial, TRIAL_FAILED, "names '%s', not '%s': %.600s", error->field,
                         c->malformed->field, error->message);
    }
    status = malformed_plan(&s, &b->batch);
    const struct attn_step_io io = engine_io(problem, tested);
    status =
        status == ATTN_OK ? api->run(engine->plans[0].plan, engine->layer, &io, error) : status;
    if (status != ATTN_OK) {
        return trial_call_failed(trial, "the step afterwards", status, error);
    }
    return hold_step(trial, problem, reference, tested);
}

static enum trial_result run_malformed(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct malformed_case *c = variant;
    const struct device host = {.device = {ATTN_DEVICE_CPU, 0}};
    struct side reference = {.device = &host}, tested = {.device = trial->device};
    struct engine engine = {.core = c->core, .device = trial->device};
    struct attn_error error = ATTN_ERROR_INIT;
    struct problem problem;
    if (!problem_init(&problem, c->space, &c->attend_case, seed)) {
        return trial_say(trial, TRIAL_FAILED, "no memory for the case");
    }
    enum trial_result result = trial_say(trial, TRIAL_FAILED, "no memory for the case");
    if (side_write_context(trial->reference, &problem, &error) == ATTN_OK &&
        side_init(&reference, trial->reference, &host, &problem) &&
        side_init(&tested, trial->tested, trial->device, &problem) &&
        side_run_reference(&reference, &problem, &error) == ATTN_OK) {
        result = try_malformed(trial, c, &problem, &reference, &tested, &engine);
    }
    engine_finish(&engine);
    side_finish(&tested);
    side_finish(&reference);
    problem_finish(&problem);
    return result;
}

void malformed_cases(const struct core_sink *sink)
{
    static const struct malformed_list *const lists[] = {&malformed_runs, &malformed_batches,
                                                         &malformed_binds};
    struct malformed_case c = {.core = sink->core, .space = sink->space};
    bool found = false;
    for (int32_t dtype = ATTN_DTYPE_F32; dtype >= ATTN_DTYPE_F16 && !found; dtype--) {
        found = case_of_cache(sink->space, dtype, dtype, &c.attend_case);
    }
    for (size_t i = 0; found && i < sizeof lists / sizeof *lists; i++) {
        for (size_t j = 0; j < lists[i]->count; j++) {
            char name[96];
            c.malformed = &lists[i]->items[j];
            snprintf(name, sizeof name, "malformed.%s", c.malformed->name);
            sink->cases->try(sink->cases->user, name, run_malformed, &c);
        }
    }
}
