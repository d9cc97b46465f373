/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/backend.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "common/find.h"
#include "harness/watch.h"
#include "support/client.h"
#include "support/services.h"

#define HOST_THREADS 2

static bool is_path(const char *target)
{
    size_t length = strlen(target);
    return strchr(target, '/') != NULL || (length > 3 && strcmp(target + length - 3, ".so") == 0);
}

/* The plugin's file of the backend "name" or "name@variant". */
static attn_status find_file(const struct attn_api *api, attn_runtime *runtime, const char *name,
                             char *file, size_t size, struct attn_error *error)
{
    struct attn_backend_info backend = {.struct_size = sizeof backend};
    struct attn_plugin_info plugin = {.struct_size = sizeof plugin};
    int32_t index = backend_find(api, runtime, name, error);
    if (index < 0) {
        return error->status;
    }
    attn_status status = api->backend_info(runtime, index, &backend);
    status = status == ATTN_OK ? api->plugin_info(runtime, backend.plugin, &plugin) : status;
    if (status == ATTN_OK) {
        snprintf(file, size, "%s", plugin.file);
    }
    return status;
}

attn_status resolve(struct resolved *resolved, const char *target, struct attn_error *error)
{
    const struct attn_api *api;
    attn_runtime *runtime = NULL;
    attn_status status = library_open(&api, error);
    if (status == ATTN_OK) {
        status = api->runtime_create(NULL, &runtime, error);
    }
    if (status != ATTN_OK) {
        return status;
    }
    status =
        find_file(api, runtime, "cpu_ref", resolved->reference, sizeof resolved->reference, error);
    if (status == ATTN_OK && is_path(target)) {
        resolved->name = NULL;
        char *absolute = realpath(target, NULL);
        if (absolute == NULL || strlen(absolute) >= sizeof resolved->file) {
            status =
                command_error(error, ATTN_ERROR_NOT_FOUND, "file", "'%s' cannot be opened", target);
        } else {
            strcpy(resolved->file, absolute);
        }
        free(absolute);
    } else if (status == ATTN_OK) {
        resolved->name = target;
        status = find_file(api, runtime, target, resolved->file, sizeof resolved->file, error);
    }
    api->runtime_destroy(runtime);
    return status;
}

static void host_log(void *user, int32_t level, const char *who, const char *message)
{
    if (level <= ATTN_LOG_WARN) {
        fprintf(stderr, "attn-check: %s: %s\n", who, message);
    }
}

static void *host_allocate(void *user, size_t size, size_t alignment)
{
    watch_allocation(size, __builtin_return_address(0));
    return services_allocate(user, size, alignment);
}

void backend_stack_used(struct check_host *services, size_t bytes)
{
    size_t deepest = atomic_load(&services->deepest_stack);
    while (bytes > deepest &&
           !atomic_compare_exchange_weak(&services->deepest_stack, &deepest, bytes)) {
    }
}

/* Slices run in reverse order with changing workers: no backend may rely on 0 being first. */
static void host_parallel_for(void *user, int64_t count, int64_t grain, attn_parallel_body *body,
                              void *argument)
{
    int64_t slice = grain > 0 ? grain : 1;
    int32_t worker = 0;
    stack_paint();
    for (int64_t begin = (count - 1) / slice * slice; begin >= 0 && count > 0; begin -= slice) {
        int64_t end = begin + slice < count ? begin + slice : count;
        body(argument, begin, end, worker);
        worker = (worker + 1) % HOST_THREADS;
    }
    backend_stack_used(user, stack_used());
}

static void *copy_bytes(const void *source, size_t size)
{
    void *copy = command_calloc(size, 1);
    return size > 0 ? memcpy(copy, source, size) : copy;
}

/* The first backend of that name; text and arrays are copied since they are the plugin's only until
 * return. */
struct wanted {
    struct backend *backend;
    const char *name;
};

const void *backend_extension(const struct attn_backend_caps *caps, uint32_t id, size_t size)
{
    const struct attn_ext *ext = caps->next;
    while (ext != NULL && (ext->id != id || ext->struct_size < size)) {
        ext = ext->next;
    }
    return ext;
}

/* Copies of what is known, chained to the copied capabilities. */
static void take_extensions(struct backend *backend, const struct attn_backend_caps *caps)
{
    const struct {
        uint32_t id;
        size_t size;
        struct attn_ext *copy;
    } known[] = {
        {ATTN_EXT_DRAFT_INDEX_LISTS_CAPS, sizeof backend->lists, &backend->lists.ext},
        {ATTN_EXT_CAPS_INDEXER, sizeof backend->indexer, &backend->indexer.ext},
        {ATTN_EXT_DRAFT_COMPRESSED_CAPS, sizeof backend->compressed, &backend->compressed.ext},
        {ATTN_EXT_DRAFT_RECURRENT_CAPS, sizeof backend->rule, &backend->rule.ext},
        {ATTN_EXT_CAPS_MLA, sizeof backend->mla, &backend->mla.ext},
        {ATTN_EXT_CAPS_RECURRENT, sizeof backend->gdn, &backend->gdn.ext}};
    backend->caps.next = NULL;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const struct attn_ext *ext = backend_extension(caps, known[i].id, known[i].size);
        if (ext != NULL) {
            memcpy(known[i].copy, ext, known[i].size);
            known[i].copy->struct_size = known[i].size;
            known[i].copy->next = backend->caps.next;
            backend->caps.next = known[i].copy;
        }
    }
}

static attn_status take_device(void *user, const struct attn_device_info *device,
                               struct attn_error *why)
{
    return device->name != NULL ? ATTN_OK : ATTN_ERROR_INVALID_ARGUMENT;
}

static attn_status take_backend(void *user, const struct attn_backend_caps *caps,
                                struct attn_error *why)
{
    struct wanted *wanted = user;
    struct attn_backend_caps *mine = &wanted->backend->caps;
    if (caps->struct_size < sizeof *caps || mine->name != NULL ||
        (wanted->name != NULL && !backend_is_named(caps, wanted->name))) {
        char *others = wanted->backend->others;
        size_t used = strlen(others);
        snprintf(others + used, sizeof wanted->backend->others - used, "%s%s%s%s",
                 used > 0 ? ", " : "", caps->name, caps->variant[0] != '\0' ? "@" : "",
                 caps->variant);
        return ATTN_OK;
    }
    *mine = *caps;
    mine->name = copy_bytes(caps->name, strlen(caps->name) + 1);
    mine->variant = copy_bytes(caps->variant, strlen(caps->variant) + 1);
    mine->head_sizes =
        copy_bytes(caps->head_sizes, (size_t)caps->num_head_sizes * sizeof *caps->head_sizes);
    mine->block_sizes =
        copy_bytes(caps->block_sizes, (size_t)caps->num_block_sizes * sizeof *caps->block_sizes);
    mine->refused =
        copy_bytes(caps->refused, (size_t)caps->num_refused * (size_t)caps->refused_stride);
    mine->extensions = NULL;
    mine->num_extensions = 0;
    take_extensions(wanted->backend, caps);
    return ATTN_OK;
}

/* The first of what it did to the process until the end of `stage`; undone as far as it can be. */
static void judge_conduct(struct backend *backend, const char *stage)
{
    char text[160];
    const char *done =
        backend->before != NULL ? conduct_difference(backend->before, text, sizeof text) : NULL;
    if (done != NULL && backend->misconduct[0] == '\0') {
        snprintf(backend->misconduct, sizeof backend->misconduct, "%s %s", stage, done);
    }
    if (done != NULL) {
        conduct_restore(backend->before);
    }
}

static attn_status create(struct backend *backend, const char *name, struct attn_error *error)
{
    struct wanted wanted = {backend, name};
    struct attn_probe_sink sink = {sizeof sink, NULL, &wanted, take_device, take_backend};
    const struct attn_kernels *kernels = NULL;
    if (backend->before != NULL) {
        backend->before->threads = -1; /* a driver's or a library's own may begin in a probe */
    }
    attn_status status = backend->plugin->probe(&backend->services.host, &sink, error);
    judge_conduct(backend, "probe");
    if (status != ATTN_OK) {
        return status;
    }
    if (backend->caps.name == NULL) {
        return command_error(error, ATTN_ERROR_NOT_FOUND, "backend", "%s",
                             "the plugin reports no backend of that name");
    }
    status = backend->plugin->create(
        &SIZED(attn_create_args, .host = &backend->services.host, .backend = backend->caps.name,
               .variant = backend->caps.variant, .device = backend->caps.device),
        &backend->instance, &kernels, error);
    judge_conduct(backend, "create");
    if (status != ATTN_OK) {
        return status;
    }
    size_t size = kernels->struct_size < sizeof backend->kernels ? kernels->struct_size
                                                                 : sizeof backend->kernels;
    memcpy(&backend->kernels, kernels, size);
    return ATTN_OK;
}

attn_status backend_open(struct backend *backend, const char *file, const char *name,
                         struct conduct *before, struct attn_error *error)
{
    attn_status status;
    memset(backend, 0, sizeof *backend);
    backend->before = before;
    backend->services.host = SIZED(attn_host, .user = &backend->services, .log = host_log,
                                   .allocate = host_allocate, .release = services_release,
                                   .parallel_for = host_parallel_for, .num_threads = HOST_THREADS);
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    judge_conduct(backend, "a constructor");
    void *symbol = library != NULL ? dlsym(library, ATTN_PLUGIN_ENTRY_SYMBOL) : NULL;
    if (symbol == NULL) {
        return command_error(error, ATTN_ERROR_PLUGIN, "file", "%s", dlerror());
    }
    memcpy(&backend->entry, &symbol, sizeof backend->entry);
    status = backend->entry(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &backend->plugin, error);
    judge_conduct(backend, "entry");
    if (status == ATTN_OK) {
        status = create(backend, name, error);
    }
    if (status != ATTN_OK) {
        backend_close(backend);
    }
    return status;
}

void backend_close(struct backend *backend)
{
    if (backend->plugin != NULL && backend->instance != NULL) {
        backend->plugin->destroy(backend->instance);
    }
    free((void *)(uintptr_t)backend->caps.name);
    free((void *)(uintptr_t)backend->caps.variant);
    free((void *)(uintptr_t)backend->caps.head_sizes);
    free((void *)(uintptr_t)backend->caps.block_sizes);
    free((void *)(uintptr_t)backend->caps.refused);
    memset(backend, 0, sizeof *backend);
}
