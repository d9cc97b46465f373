/* SPDX-License-Identifier: Apache-2.0 */
#include "core/engine.h"
#include "harness/planned.h"
#include "support/client.h"

#define SPARE_LIMITS 8

attn_status engine_open(struct check_engine *engine, struct core *core, const struct device *device,
                        const struct attn_layer_desc *layer, struct attn_error *error)
{
    const struct attn_select_options options = core_options(core);
    *engine = (struct check_engine){.core = core, .device = device};
    attn_status status =
        client_model(core->api, core->runtime, &options, &layer, 1, &engine->model, error);
    if (status == ATTN_OK) {
        engine->layer = core->api->model_layer(engine->model, 0);
    }
    return status;
}

attn_status engine_bind(struct check_engine *engine, const struct problem_copy *copy,
                        struct attn_error *error)
{
    const struct binding *binding = &copy->binding;
    const struct attn_api *api = engine->core->api;
    attn_status status = engine_open(engine, engine->core, copy->device, &binding->layer, error);
    if (status != ATTN_OK) {
        return status;
    }
    if (binding->attend.k_cache != NULL) {
        status = client_bind(api, engine->layer, binding->attend.k_cache, binding->attend.v_cache,
                             error);
    }
    return status == ATTN_OK ? api->layer_bind_params(engine->layer, &binding->params, error)
                             : status;
}

attn_status engine_make_plan(struct check_engine *engine, int32_t index,
                             const struct attn_plan_options *options, struct attn_error *error)
{
    const struct attn_api *api = engine->core->api;
    struct engine_plan *plan = &engine->plans[index];
    attn_status status = api->plan_create(engine->model, 0, options, &plan->plan, error);
    if (status != ATTN_OK) {
        return status;
    }
    plan->bytes = client_workspace_bytes(api, plan->plan);
    plan->workspace = guarded_alloc(engine->device, plan->bytes, "workspace", &status);
    return status == ATTN_OK
               ? client_bind_workspace(api, plan->plan, plan->workspace, plan->bytes, error)
               : status;
}

attn_status engine_add_plan(struct check_engine *engine, int32_t index,
                            const struct problem_copy *copy, bool graph, struct attn_error *error)
{
    const struct check_problem *problem = copy->problem;
    const struct attn_batch *batch = &copy->binding.batch;
    const struct attn_limits limits =
        client_limits(problem->num_reqs, problem->num_tokens, batch->max_query_len,
                      batch->max_seq_len + SPARE_LIMITS, (int32_t)problem->table_stride);
    const struct attn_plan_options options =
        SIZED(attn_plan_options, .limits = &limits, .graph = graph);
    return engine_make_plan(engine, index, &options, error);
}

void engine_finish(struct check_engine *engine)
{
    if (engine->core == NULL) {
        return;
    }
    for (int32_t i = 0; i < 2; i++) {
        engine->core->api->plan_destroy(engine->plans[i].plan);
        guarded_free(engine->device, engine->plans[i].workspace);
    }
    engine->core->api->model_destroy(engine->model);
}

struct attn_step_io engine_io(const struct problem_copy *copy)
{
    const struct binding *b = &copy->binding;
    bool keys = copy->problem->shape != SHAPE_CROSS; /* an encoder's were written before */
    return SIZED(attn_step_io, .next = b->attend.next, .stream = copy->stream, .q = &b->q,
                 .k = keys ? &b->k : NULL, .v = keys ? &b->v : NULL, .out = b->attend.out,
                 .lse = b->attend.lse);
}

bool engine_guards_whole(const struct check_engine *engine)
{
    for (int32_t i = 0; i < 2; i++) {
        const struct engine_plan *plan = &engine->plans[i];
        if (plan->workspace != NULL &&
            !guarded_whole(engine->device, plan->workspace, plan->bytes)) {
            return false;
        }
    }
    return true;
}
