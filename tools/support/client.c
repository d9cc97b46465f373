/* SPDX-License-Identifier: Apache-2.0 */
#include "client.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ALIGNMENT 256

/* Fills a function pointer with a symbol of a library, which stays open. */
static attn_status find_entry(const char *path, const char *symbol, void *entry,
                              struct attn_error *error)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void *address = library != NULL ? dlsym(library, symbol) : NULL;
    if (address == NULL) {
        const char *why = dlerror();
        const char *name = strrchr(path, '/');
        error->status = ATTN_ERROR_NOT_FOUND;
        snprintf(error->field, sizeof error->field, "%s", name != NULL ? name + 1 : path);
        snprintf(error->message, sizeof error->message, "%s",
                 why != NULL ? why : "no entry symbol");
        return ATTN_ERROR_NOT_FOUND;
    }
    memcpy(entry, &address, sizeof address);
    return ATTN_OK;
}

attn_status client_load(const char *path, const struct attn_api **api, struct attn_error *error)
{
    attn_get_api_fn *get_api;
    attn_status status = find_entry(path, ATTN_GET_API_SYMBOL, &get_api, error);
    return status ? status : get_api(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, api, error);
}

attn_status client_plugin(const char *path, uint32_t min, uint32_t max,
                          const struct attn_plugin **plugin, struct attn_error *error)
{
    attn_plugin_entry_fn *entry;
    *plugin = NULL;
    attn_status status = find_entry(path, ATTN_PLUGIN_ENTRY_SYMBOL, &entry, error);
    return status ? status : entry(min, max, plugin, error);
}

struct attn_runtime_options client_options(const char *plugins)
{
    return SIZED(attn_runtime_options, .backend = "", .plugin_path = plugins, .cache_dir = "",
                 .num_threads = 1, .ignore_environment = 1, .no_default_plugins = 1);
}

attn_status client_open(const char *path, const struct attn_runtime_options *options,
                        const struct attn_api **api, attn_runtime **runtime,
                        struct attn_error *error)
{
    *runtime = NULL;
    attn_status status = client_load(path, api, error);
    return status ? status : (*api)->runtime_create(options, runtime, error);
}

attn_status client_model(const struct attn_api *api, attn_runtime *runtime,
                         const struct attn_select_options *options,
                         const struct attn_layer_desc *const *layers, int32_t num_layers,
                         attn_model **model, struct attn_error *error)
{
    attn_assignment *assignment = NULL;
    *model = NULL;
    attn_status status = api->select(runtime, options, layers, num_layers, &assignment, error);
    if (status == ATTN_OK) {
        status = api->model_create(runtime, assignment, NULL, model, error);
    }
    api->assignment_destroy(assignment); /* the model keeps what it needs */
    return status;
}

static bool is_wanted(const struct attn_reason *reason, const struct attn_reason *wanted)
{
    return strcmp(reason->field, wanted->field) == 0 &&
           (wanted->asked == NULL || strcmp(reason->asked, wanted->asked) == 0) &&
           (wanted->supported == NULL || strcmp(reason->supported, wanted->supported) == 0);
}

int32_t client_refuses(const struct attn_api *api, attn_runtime *runtime,
                       const struct attn_layer_desc *layer, int32_t phase, const char *backend,
                       const struct attn_reason *wanted)
{
    const struct attn_select_options options =
        SIZED(attn_select_options, .backend = backend, .flags = ATTN_SELECT_KEEP_UNSERVED);
    attn_assignment *assignment;
    int32_t found = 0;
    if (api->select(runtime, &options, &layer, 1, &assignment, NULL) != ATTN_OK) {
        return -1;
    }
    for (int32_t b = 0; b < api->backend_count(runtime); b++) {
        struct attn_backend_info info = {.struct_size = sizeof info};
        int32_t verdict, count = 0;
        if (api->backend_info(runtime, b, &info) == ATTN_OK &&
            strcmp(info.caps->name, backend) == 0) {
            (void)api->assignment_verdict(assignment, 0, phase, b, &verdict, &count);
        }
        for (int32_t i = 0; i < count; i++) {
            struct attn_reason reason = {.struct_size = sizeof reason};
            found += api->assignment_reason(assignment, 0, phase, b, i, &reason) == ATTN_OK &&
                     is_wanted(&reason, wanted);
        }
    }
    api->assignment_destroy(assignment);
    return found;
}

void *client_memory(size_t bytes)
{
    size_t whole = (bytes / ALIGNMENT + 1) * ALIGNMENT;
    void *memory = aligned_alloc(ALIGNMENT, whole);
    return memory != NULL ? memset(memory, 0xff, whole) : NULL;
}

static attn_status no_memory(struct attn_error *error, size_t bytes)
{
    error->status = ATTN_ERROR_OUT_OF_MEMORY;
    snprintf(error->field, sizeof error->field, "memory");
    snprintf(error->message, sizeof error->message, "no %zu bytes", bytes);
    return ATTN_ERROR_OUT_OF_MEMORY;
}

attn_status client_spec(const struct attn_api *api, const attn_layer *layer,
                        struct attn_cache_spec *spec, struct attn_error *error)
{
    *spec = (struct attn_cache_spec){.struct_size = sizeof *spec};
    return api->layer_num_caches(layer) > 0 ? api->layer_cache_spec(layer, 0, spec, error)
                                            : ATTN_OK;
}

attn_status client_views(const struct attn_api *api, attn_layer *layer, void *base,
                         int64_t num_blocks, struct attn_kv_view *k, struct attn_kv_view *v,
                         struct attn_error *error)
{
    const struct attn_cache_memory memory =
        SIZED(attn_cache_memory, .base = base, .num_blocks = num_blocks);
    attn_status status = api->layer_bind_memory(layer, &memory, error);
    if (status == ATTN_OK || status == ATTN_ERROR_ORDER) {
        status = api->layer_cache_view(layer, 0, k, error);
    }
    return status == ATTN_OK && v != NULL ? api->layer_cache_view(layer, 1, v, error) : status;
}

attn_status client_cache(const struct attn_api *api, attn_layer *layer, int64_t num_blocks,
                         struct attn_cache_spec *spec, void **cache, struct attn_error *error)
{
    struct attn_cache_spec own;
    struct attn_cache_memory memory = SIZED(attn_cache_memory, .num_blocks = num_blocks);
    *cache = NULL;
    attn_status status = client_spec(api, layer, &own, error);
    if (spec != NULL) {
        *spec = own;
    }
    if (status != ATTN_OK || own.kind == ATTN_KV_SPEC_NONE) {
        return status;
    }
    const size_t bytes = (size_t)(num_blocks * own.padded_page_bytes);
    memory.base = *cache = client_memory(bytes);
    return *cache != NULL ? api->layer_bind_memory(layer, &memory, error) : no_memory(error, bytes);
}

attn_status client_plan(const struct attn_api *api, attn_model *model, int32_t group,
                        const struct attn_plan_options *options, attn_plan **plan, void **workspace,
                        struct attn_error *error)
{
    *workspace = NULL;
    attn_status status = api->plan_create(model, group, options, plan, error);
    const size_t bytes = status == ATTN_OK ? client_workspace_bytes(api, *plan) : 0;
    if (status != ATTN_OK) {
        return status;
    }
    *workspace = client_memory(bytes);
    return *workspace != NULL ? client_bind_workspace(api, *plan, *workspace, bytes, error)
                              : no_memory(error, bytes);
}

attn_status planned_prepare(const struct attn_kernels *kernels, struct attn_attend_args *call,
                            const struct attn_limits *limits, struct attn_schedule_size *size,
                            struct attn_error *error)
{
    const struct attn_prepare_args prepare_args = SIZED(
        attn_prepare_args, .instance = call->instance, .layer = call->layer, .params = call->params,
        .k_cache = call->k_cache, .v_cache = call->v_cache, .phase = call->phase);
    struct attn_schedule_size_args sized =
        SIZED(attn_schedule_size_args, .instance = call->instance, .limits = limits);
    attn_status status = ATTN_OK;
    if (kernels->prepare != NULL) {
        status = kernels->prepare(&prepare_args, &call->prepared, error);
    }
    sized.prepared = call->prepared;
    if (status == ATTN_OK && kernels->create_plan_state != NULL) {
        status = kernels->create_plan_state(&sized, &call->plan_state, error);
    }
    sized.plan_state = call->plan_state;
    if (status == ATTN_OK && kernels->schedule_size != NULL) {
        status = kernels->schedule_size(&sized, size, error);
    }
    return status;
}

void planned_release(const struct attn_kernels *kernels, const struct attn_attend_args *call)
{
    if (call->plan_state != NULL && kernels->destroy_plan_state != NULL) {
        kernels->destroy_plan_state(call->instance, call->plan_state);
    }
    if (call->prepared != NULL && kernels->release != NULL) {
        kernels->release(call->instance, call->prepared);
    }
}
