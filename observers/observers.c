/* SPDX-License-Identifier: Apache-2.0 */
/* The slots of struct attn_api that observers stand before. */
#include "observers.h"

#include <stdio.h>
#include <string.h>

#include "host/env.h"
#include "select/assignment.h"
#include "step/plan_state.h"
#include "util/structs.h"

/* FOLDER:layer=3,step=17[,contents=real] */
static attn_status read_record(struct recording *record, const char *text, struct attn_error *error)
{
    char contents[16] = "random";
    int end = 0;
    const char *colon = strrchr(text, ':');
    const int found = colon != NULL ? sscanf(colon, ":layer=%9d,step=%9d%n,contents=%15[a-z]%n",
                                             &record->layer, &record->step, &end, contents, &end)
                                    : 0;
    record->real = strcmp(contents, "real") == 0;
    BAD_IF(text[0] != '/' || found < 2 || colon[end] != '\0' || record->layer < 0 ||
               record->step < 0 || (!record->real && strcmp(contents, "random") != 0),
           "ATTN_RECORD",
           "'%s' is not an absolute folder and what is recorded, as in /folder:layer=3,step=17 or "
           "/folder:layer=3,step=17,contents=real",
           text);
    record->folder[colon - text] = '\0';
    return ATTN_OK;
}

/* An absolute FILE, and ATTN_TRACE_EVERY=N: one step in N. */
static attn_status read_trace(struct trace_file *trace, const char *file, const char *every,
                              struct attn_error *error)
{
    char after = '\0';
    BAD_IF(file[0] != '/', "ATTN_TRACE", "'%s' is not an absolute path", file);
    BAD_IF(every != NULL &&
               (sscanf(every, "%9d%c", &trace->every, &after) != 1 || trace->every < 1),
           "ATTN_TRACE_EVERY", "'%s' is not a number of steps; 1 to 999999999 are allowed", every);
    return trace_open(trace, error);
}

static attn_status open_observers(attn_runtime *runtime, const struct attn_runtime_options *options,
                                  struct attn_error *error)
{
    const char *file = env_get(options, "ATTN_TRACE"), *record = env_get(options, "ATTN_RECORD");
    struct arena *arena = &runtime->arena;
    if (file == NULL && record == NULL) {
        return ATTN_OK;
    }
    struct observers *o = runtime->observers = arena_alloc(arena, sizeof *runtime->observers);
    if (o != NULL) {
        o->trace = (struct trace_file){.runtime = runtime, .every = 1, .descriptor = -1};
        o->trace.path = file != NULL ? arena_string(arena, file) : NULL;
        o->record.folder = record != NULL ? arena_string(arena, record) : NULL;
    }
    NO_MEMORY_IF(arena->failed, "settings", "the settings");
    TRY_IF(file != NULL, read_trace(&o->trace, file, env_get(options, "ATTN_TRACE_EVERY"), error));
    return record != NULL ? read_record(&o->record, record, error) : ATTN_OK;
}

attn_status observed_runtime_create(const struct attn_runtime_options *given,
                                    attn_runtime **runtime, struct attn_error *error)
{
    struct attn_runtime_options options = {.struct_size = sizeof options};
    TRY(runtime_create(given, runtime, error));
    TRY_IF(given != NULL, struct_read(&options, ABI_RUNTIME_OPTIONS, given, error));
    const attn_status status = open_observers(*runtime, &options, error);
    if (status != ATTN_OK) {
        observed_runtime_destroy(*runtime);
        *runtime = NULL;
    }
    return status;
}

void observed_runtime_destroy(attn_runtime *runtime)
{
    if (trace_of(runtime) != NULL) {
        trace_close(trace_of(runtime));
    }
    runtime_destroy(runtime);
}

attn_status observed_select(attn_runtime *runtime, const struct attn_select_options *options,
                            const struct attn_layer_desc *const *layers, int32_t num_layers,
                            attn_assignment **assignment, struct attn_error *error)
{
    const int64_t begin = trace_begin(trace_of(runtime), "select");
    const attn_status status =
        select_layers(runtime, options, layers, num_layers, assignment, error);
    trace_end(trace_of(runtime), "select", begin, "\"layers\":%d,\"status\":%d", num_layers,
              status);
    if (status == ATTN_OK) {
        selection_log(*assignment);
    }
    return status;
}

attn_status observed_model_create(attn_runtime *runtime, const attn_assignment *assignment,
                                  const struct attn_model_options *options, attn_model **model,
                                  struct attn_error *error)
{
    const int64_t begin = trace_begin(trace_of(runtime), "bind");
    const attn_status status = model_create(runtime, assignment, options, model, error);
    if (begin != 0 && status == ATTN_OK) {
        trace_model_begin(*model);
    }
    trace_end(trace_of(runtime), "bind", begin, "\"layers\":%d,\"status\":%d",
              assignment_num_layers(assignment), status);
    return status;
}

void observed_model_destroy(attn_model *model)
{
    if (model != NULL && trace_of(model->runtime) != NULL) {
        trace_model_end(model);
    }
    model_destroy(model);
}

attn_status observed_plan_create(attn_model *model, int32_t group,
                                 const struct attn_plan_options *options, attn_plan **plan,
                                 struct attn_error *error)
{
    struct trace_file *trace = trace_of(model != NULL ? model->runtime : NULL);
    const int64_t begin = trace_begin(trace, "plan_create");
    const attn_status status = plan_create(model, group, options, plan, error);
    trace_end(trace, "plan_create", begin, "\"group\":%d,\"status\":%d", group, status);
    return status;
}

static attn_status observe_steps(attn_plan *plan, const char *name, int64_t begin, bool brought,
                                 attn_status status)
{
    const struct observers *o = plan != NULL ? plan->model->runtime->observers : NULL;
    if (status == ATTN_OK && o != NULL && o->record.folder != NULL) {
        capsule_watch(plan);
    }
    trace_plan_end(plan, name, begin, brought, status);
    return status;
}

attn_status observed_plan_batch(attn_plan *plan, const struct attn_batch *batch, void *stream,
                                struct attn_error *error)
{
    const int64_t begin = trace_plan_begin(plan, "plan_batch", false);
    return observe_steps(plan, "plan_batch", begin, true, plan_batch(plan, batch, stream, error));
}

attn_status observed_plan_graph(attn_plan *plan, int32_t mode, const struct attn_batch *batch,
                                void *stream, struct attn_error *error)
{
    const bool captured = mode == ATTN_PLAN_CAPTURE || mode == ATTN_PLAN_IN_GRAPH;
    const int64_t begin = trace_plan_begin(plan, "plan_graph", captured);
    return observe_steps(plan, "plan_graph", begin, mode != ATTN_PLAN_IN_GRAPH,
                         plan_graph(plan, mode, batch, stream, error));
}

attn_status observed_plan_update_block_table(attn_plan *plan, const attn_plan *source,
                                             const struct attn_batch *tables, void *stream,
                                             struct attn_error *error)
{
    static const char name[] = "plan_update_block_table";
    const int64_t begin = trace_plan_begin(plan, name, plan != NULL && plan->capturing);
    return observe_steps(plan, name, begin, true,
                         plan_update_block_table(plan, source, tables, stream, error));
}

attn_status observed_launch_graph(attn_open_device *opened, void *graph, void *stream,
                                  struct attn_error *error)
{
    struct trace_file *trace = trace_of(opened != NULL ? opened->runtime : NULL);
    const int64_t begin = trace_begin(trace, "launch_graph");
    const attn_status status = device_launch_graph(opened, graph, stream, error);
    trace_end(trace, "launch_graph", begin, "%s", "");
    return status;
}
