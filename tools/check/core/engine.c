/* SPDX-License-Identifier: Apache-2.0 */
#include "core/engine.h"

#include <string.h>

#include "common/command.h"
#include "common/find.h"
#include "harness/planned.h"
#include "harness/watch.h"
#include "support/client.h"
#include "support/services.h"

#define CORE_THREADS 2
#define SPARE_LIMITS 8

static void *count_allocate(void *user, size_t size, size_t alignment)
{
    watch_allocation(size, __builtin_return_address(0));
    return services_allocate(user, size, alignment);
}

/* What goes wrong is in the errors; cases that have to be refused would fill the log. */
static void log_nothing(void *user, int32_t level, const char *who, const char *message)
{
}

static bool same_backend(const struct attn_backend_caps *a, const struct attn_backend_caps *b)
{
    return strcmp(a->name, b->name) == 0 && strcmp(a->variant, b->variant) == 0 &&
           a->device.type == b->device.type && a->device.id == b->device.id;
}

/* The core's copy of the declaration, or why the core did not take it. */
static attn_status find_backend(struct core *core, const struct attn_backend_caps *tested,
                                struct attn_error *error)
{
    const struct attn_api *api = core->api;
    for (int32_t i = 0; i < api->backend_count(core->runtime); i++) {
        struct attn_backend_info info = {.struct_size = sizeof info};
        if (api->backend_info(core->runtime, i, &info) == ATTN_OK &&
            same_backend(info.caps, tested)) {
            core->caps = info.caps;
            return ATTN_OK;
        }
    }
    command_error(error, ATTN_ERROR_PLUGIN, "backend", "the core does not offer %s", core->order);
    for (int32_t i = 0; i < api->plugin_count(core->runtime); i++) {
        struct attn_plugin_info plugin = {.struct_size = sizeof plugin};
        if (api->plugin_info(core->runtime, i, &plugin) == ATTN_OK && plugin.reason[0] != '\0') {
            command_error(error, ATTN_ERROR_PLUGIN, "backend", "the core does not offer %s: %.700s",
                          core->order, plugin.reason);
        }
    }
    return ATTN_ERROR_PLUGIN;
}

attn_status core_open(struct core *core, const struct resolved *resolved,
                      const struct attn_backend_caps *tested, struct attn_error *error)
{
    char path[2 * 4096 + 2];
    memset(core, 0, sizeof *core);
    bool two = strcmp(resolved->file, resolved->reference) != 0;
    snprintf(path, sizeof path, "%s%s%s", resolved->file, two ? ":" : "",
             two ? resolved->reference : "");
    backend_text(tested, core->order, sizeof core->order);
    core->device = tested->device;
    core->host = SIZED(attn_host, .user = core, .log = log_nothing, .allocate = count_allocate,
                       .release = services_release);
    const struct attn_runtime_options options =
        SIZED(attn_runtime_options, .host = &core->host, .backend = "", .plugin_path = path,
              .cache_dir = "", .num_threads = CORE_THREADS, .ignore_environment = 1,
              .no_default_plugins = 1, .isolation = -1);
    attn_status status = library_open(&core->api, error);
    status = status ? status : core->api->runtime_create(&options, &core->runtime, error);
    status = status ? status : find_backend(core, tested, error);
    if (status != ATTN_OK) {
        core_close(core);
    }
    return status;
}

void core_close(struct core *core)
{
    if (core->api != NULL) {
        core->api->runtime_destroy(core->runtime);
    }
    core->runtime = NULL;
}

struct core core_of_reference(const struct core *core)
{
    return (struct core){.api = core->api,
                         .runtime = core->runtime,
                         .device = {ATTN_DEVICE_CPU, 0},
                         .order = "cpu_ref"};
}

struct attn_select_options core_options(const struct core *core)
{
    return SIZED(attn_select_options, .device = core->device, .backend = core->order);
}

bool core_serves(const struct core *core, const struct attn_layer_desc *layer)
{
    const struct attn_select_options options = core_options(core);
    attn_assignment *assignment = NULL;
    const bool served =
        core->api->select(core->runtime, &options, &layer, 1, &assignment, NULL) == ATTN_OK;
    core->api->assignment_destroy(assignment);
    return served;
}

attn_status engine_open(struct check_engine *engine, struct core *core, const struct device *device,
                        const struct attn_layer_desc *layer, struct attn_error *error)
{
    const struct attn_select_options options = core_options(core);
    *engine = (struct check_engine){.core = core, .device = device};
    TRY(client_model(core->api, core->runtime, &options, &layer, 1, &engine->model, error));
    engine->layer = core->api->model_layer(engine->model, 0);
    return ATTN_OK;
}

attn_status engine_bind(struct check_engine *engine, const struct problem_copy *copy,
                        struct attn_error *error)
{
    const struct binding *binding = &copy->binding;
    const struct attn_api *api = engine->core->api;
    TRY(engine_open(engine, engine->core, copy->device, &binding->layer, error));
    if (binding->attend.k_cache != NULL) {
        TRY(client_bind(api, engine->layer, binding->attend.k_cache, binding->attend.v_cache,
                        error));
    }
    return api->layer_bind_params(engine->layer, &binding->params, error);
}

attn_status engine_make_plan(struct check_engine *engine, int32_t index,
                             const struct attn_plan_options *options, struct attn_error *error)
{
    const struct attn_api *api = engine->core->api;
    struct engine_plan *plan = &engine->plans[index];
    attn_status status = ATTN_OK;
    TRY(api->plan_create(engine->model, 0, options, &plan->plan, error));
    plan->bytes = client_workspace_bytes(api, plan->plan);
    plan->workspace = guarded_alloc(engine->device, plan->bytes, "workspace", &status);
    TRY(status);
    return client_bind_workspace(api, plan->plan, plan->workspace, plan->bytes, error);
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
        if (engine->device != NULL) { /* bound once, so that there may be a workspace */
            guarded_free(engine->device, engine->plans[i].workspace);
        }
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
