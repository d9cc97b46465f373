/* SPDX-License-Identifier: Apache-2.0 */
/* A runtime's life: its settings and services, the plugins that are found, and what they offer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host/env.h"
#include "runtime/load.h"
#include "runtime/probe.h"
#include "util/device.h"
#include "util/structs.h"

#define MAX_DEVICES 256
#define MAX_BACKENDS 1024

static const struct backend *find_backend(const attn_runtime *runtime,
                                          const struct backend *backend)
{
    for (int32_t i = 0; i < runtime->num_backends; i++) {
        const struct backend *other = &runtime->backends[i];
        if (strcmp(other->full_name, backend->full_name) == 0 &&
            device_same(other->caps.device, backend->caps.device)) {
            return other;
        }
    }
    return NULL;
}

/* A device that is not numbered by its driver is the plugin's, unless the plugin names another
 * namespace. */
static void set_namespaces(const struct found *found, const char *plugin)
{
    for (int32_t i = 0; i < found->num_devices; i++) {
        struct attn_device_info *info = &found->devices[i];
        if (info->device_namespace[0] == '\0' && !device_is_numbered(info->device)) {
            info->device_namespace = plugin;
        }
    }
    for (int32_t i = 0; i < found->num_backends; i++) {
        const struct attn_device device = found->backends[i].caps.device;
        if (found->backends[i].device_namespace[0] == '\0' && !device_is_numbered(device)) {
            found->backends[i].device_namespace = plugin;
        }
    }
}

static void add_devices(attn_runtime *runtime, const struct found *found)
{
    for (int32_t i = 0; i < found->num_devices; i++) {
        bool known = false;
        for (int32_t j = 0; j < runtime->num_devices; j++) {
            struct attn_device_info *have = &runtime->devices[j];
            const bool same =
                device_same(have->device, found->devices[i].device) &&
                strcmp(have->device_namespace, found->devices[i].device_namespace) == 0;
            /* The one of two reports that knows the ISA says more. */
            if (same && strlen(found->devices[i].isa) > strlen(have->isa)) {
                *have = found->devices[i];
            }
            known |= same;
        }
        if (!known && runtime->num_devices < MAX_DEVICES) {
            runtime->devices[runtime->num_devices++] = found->devices[i];
        }
    }
}

/* Takes a plugin's backends, all or none: an earlier plugin's name refuses the later one. */
static attn_status add_backends(attn_runtime *runtime, int32_t plugin, const struct found *found,
                                struct attn_error *error)
{
    for (int32_t i = 0; i < found->num_backends; i++) {
        const struct backend *other = find_backend(runtime, &found->backends[i]);
        ERROR_IF(other != NULL, ATTN_ERROR_PLUGIN, "name",
                 "backend '%s' is that of %s already; the first one found is kept",
                 found->backends[i].full_name, runtime->plugins[other->plugin].file);
    }
    ERROR_IF(runtime->num_backends + found->num_backends > MAX_BACKENDS, ATTN_ERROR_LIMIT,
             "backends", "more than %d backends", MAX_BACKENDS);
    for (int32_t i = 0; i < found->num_backends; i++) {
        runtime->backends[runtime->num_backends] = found->backends[i];
        runtime->backends[runtime->num_backends++].plugin = plugin;
    }
    runtime->plugins[plugin].num_backends = found->num_backends;
    return ATTN_OK;
}

/* Why a plugin, or, where its status is ATTN_OK, something that it reports, was left out. */
static attn_status keep_reason(attn_runtime *runtime, struct plugin *plugin,
                               const struct attn_error *why, struct attn_error *error)
{
    char reason[sizeof why->field + sizeof why->message + 4];
    snprintf(reason, sizeof reason, "%s%s%s", why->field, why->field[0] != '\0' ? ": " : "",
             why->message);
    plugin->reason = arena_string(&runtime->arena, reason);
    runtime_log(runtime, plugin->status == ATTN_ERROR_ABSENT ? ATTN_LOG_INFO : ATTN_LOG_WARN,
                "%s: %s", plugin->file, reason);
    return plugin->reason != NULL ? ATTN_OK : NO_MEMORY("plugins", "a reason");
}

/* One bad plugin never fails the enumeration; its reason is kept. Only memory ends it. */
static attn_status take_plugin(attn_runtime *runtime, int32_t index, struct found *found,
                               struct attn_error *error)
{
    struct plugin *plugin = &runtime->plugins[index];
    struct attn_error why = ATTN_ERROR_INIT;
    if (plugin->status != ATTN_OK) {
        return ATTN_OK;
    }
    attn_status status = plugin_check_place(plugin->file, &why);
    status = status == ATTN_OK ? runtime->isolation->examine(runtime, plugin, found, &why) : status;
    if (status == ATTN_OK) {
        set_namespaces(found, plugin->name);
        status = add_backends(runtime, index, found, &why);
    }
    if (status == ATTN_OK) {
        add_devices(runtime, found);
        return found->status == ATTN_OK ? ATTN_OK
                                        : keep_reason(runtime, plugin, &found->error, error);
    }
    /* A plugin may say that it found no memory; only our own lack of it ends the enumeration. */
    ERROR_IF(status == ATTN_ERROR_OUT_OF_MEMORY && runtime->arena.failed, status, "plugins",
             "no memory while reading %s", plugin->file);
    plugin->status = status;
    return keep_reason(runtime, plugin, &why, error);
}

static int compare_numbers(struct attn_device x, struct attn_device y)
{
    return x.type != y.type ? (x.type < y.type ? -1 : 1) : (x.id > y.id) - (x.id < y.id);
}

static int compare_backends(const void *a, const void *b)
{
    const struct backend *x = a, *y = b;
    const int names = strcmp(x->full_name, y->full_name);
    return names != 0 ? names : compare_numbers(x->caps.device, y->caps.device);
}

static int compare_devices(const void *a, const void *b)
{
    const struct attn_device_info *x = a, *y = b;
    const int numbers = compare_numbers(x->device, y->device);
    return numbers != 0 ? numbers : strcmp(x->device_namespace, y->device_namespace);
}

static attn_status find_backends(attn_runtime *runtime, struct attn_error *error)
{
    struct found found;
    TRY(plugins_discover(runtime, error));
    TRY(found_init(&found, &runtime->arena, error));
    runtime->devices = arena_array(&runtime->arena, MAX_DEVICES, sizeof *runtime->devices);
    runtime->backends = arena_array(&runtime->arena, MAX_BACKENDS, sizeof *runtime->backends);
    NO_MEMORY_IF(runtime->devices == NULL || runtime->backends == NULL, "runtime", "the backends");
    runtime->isolation = &isolation;
    attn_status status = isolation.begin(runtime, error);
    for (int32_t i = 0; i < runtime->num_plugins && status == ATTN_OK; i++) {
        status = take_plugin(runtime, i, &found, error);
    }
    isolation.end(runtime);
    TRY(status);
    qsort(runtime->backends, (size_t)runtime->num_backends, sizeof *runtime->backends,
          compare_backends);
    qsort(runtime->devices, (size_t)runtime->num_devices, sizeof *runtime->devices,
          compare_devices);
    return ATTN_OK;
}

/* The engine's host, if any, completed with our own services. */
static attn_status make_host(attn_runtime *runtime, const struct attn_runtime_options *options,
                             struct attn_error *error)
{
    struct host_services *services = &runtime->services;
    TRY_IF(options->host != NULL, struct_read(&services->engine, ABI_HOST, options->host, error));
    BAD_IF((services->engine.allocate == NULL) != (services->engine.release == NULL), "host",
           "allocate and release come together or not at all");
    BAD_IF(services->engine.num_threads < 0, "num_threads", "%d; 0 or above",
           services->engine.num_threads);
    services->log_level = ATTN_LOG_WARN;
    host_init(&runtime->host, services, 1);
    return ATTN_OK;
}

static attn_status start_pool(attn_runtime *runtime, struct attn_error *error)
{
    struct host_services *services = &runtime->services;
    services->log_level = runtime->settings.log_level;
    runtime->host.num_threads =
        services->engine.parallel_for != NULL && services->engine.num_threads > 0
            ? services->engine.num_threads
            : runtime->settings.num_threads;
    if (services->engine.parallel_for != NULL && runtime->settings.validate) {
        services->watched_threads = runtime->host.num_threads;
    }
    host_choose_parallel_for(&runtime->host);
    if (services->engine.parallel_for == NULL) {
        services->pool = pool_create(&runtime->host, runtime->host.num_threads);
        NO_MEMORY_IF(services->pool == NULL, "ATTN_NUM_THREADS", "the pool");
    }
    return ATTN_OK;
}

attn_status runtime_create(const struct attn_runtime_options *given, attn_runtime **out,
                           struct attn_error *error)
{
    struct attn_runtime_options options = {.struct_size = sizeof options};
    attn_runtime on_stack = {0}; /* until its host can allocate */
    BAD_IF(out == NULL, "runtime", "runtime is NULL");
    *out = NULL;
    TRY_IF(given != NULL, struct_read(&options, ABI_RUNTIME_OPTIONS, given, error));
    TRY(make_host(&on_stack, &options, error));
    attn_runtime *runtime = host_alloc(&on_stack.host, sizeof *runtime);
    NO_MEMORY_IF(runtime == NULL, "runtime", "the runtime");
    runtime->services = on_stack.services;
    host_init(&runtime->host, &runtime->services, 1);
    arena_init(&runtime->arena, &runtime->host);
    lock_init(&runtime->lock);
    attn_status status = settings_read(&runtime->settings, &options, &runtime->arena, error);
    if (status == ATTN_OK && runtime->settings.no_cache != NULL) {
        runtime_log(runtime, ATTN_LOG_WARN, "%s: nothing is cached; ATTN_CACHE_DIR names a folder",
                    runtime->settings.no_cache);
    }
    status = status ? status : start_pool(runtime, error);
    status = status ? status : find_backends(runtime, error);
    if (status != ATTN_OK) {
        runtime_destroy(runtime);
        return status;
    }
    *out = runtime;
    return ATTN_OK;
}

void runtime_destroy(attn_runtime *runtime)
{
    if (runtime == NULL) {
        return;
    }
    struct host_services services = runtime->services;
    struct attn_host host;
    pool_destroy(runtime->services.pool);
    lock_finish(&runtime->lock);
    arena_finish(&runtime->arena);
    services.pool = NULL;
    host_init(&host, &services, 1); /* the runtime's own table goes with it */
    host_free(&host, runtime, sizeof *runtime);
}
