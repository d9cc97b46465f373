/* SPDX-License-Identifier: Apache-2.0 */
#include "resolve.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/library.h"

static attn_status fail(struct attn_error *error, attn_status status, const char *field,
                        const char *format, const char *value)
{
    error->status = status;
    snprintf(error->field, sizeof error->field, "%s", field);
    snprintf(error->message, sizeof error->message, format, value);
    return status;
}

static bool is_path(const char *target)
{
    size_t length = strlen(target);
    return strchr(target, '/') != NULL || (length > 3 && strcmp(target + length - 3, ".so") == 0);
}

/* The file of the backend "name" or "name@variant". */
static bool find_file(const struct attn_api *api, attn_runtime *runtime, const char *name,
                      char *file, size_t size)
{
    for (int32_t i = 0; i < api->backend_count(runtime); i++) {
        struct attn_backend_info backend = {.struct_size = sizeof backend};
        struct attn_plugin_info plugin = {.struct_size = sizeof plugin};
        if (api->backend_info(runtime, i, &backend) != ATTN_OK) {
            continue;
        }
        size_t length = strlen(backend.caps->name);
        bool same = strncmp(name, backend.caps->name, length) == 0 &&
                    (name[length] == '\0' ||
                     (name[length] == '@' && strcmp(name + length + 1, backend.caps->variant) == 0));
        if (same && api->plugin_info(runtime, backend.plugin, &plugin) == ATTN_OK) {
            snprintf(file, size, "%s", plugin.file);
            return true;
        }
    }
    return false;
}

/* Why a plugin of that name gave no backend: absent hardware, or what is wrong with it. */
static attn_status tell_why_not(const struct attn_api *api, attn_runtime *runtime,
                                const char *name, struct attn_error *error)
{
    for (int32_t i = 0; i < api->plugin_count(runtime); i++) {
        struct attn_plugin_info plugin = {.struct_size = sizeof plugin};
        if (api->plugin_info(runtime, i, &plugin) == ATTN_OK && plugin.status != ATTN_OK &&
            (strcmp(plugin.name, name) == 0 || strstr(plugin.file, name) != NULL)) {
            return fail(error, plugin.status, plugin.file, "%s", plugin.reason);
        }
    }
    return fail(error, ATTN_ERROR_NOT_FOUND, "backend", "no backend is named '%s'", name);
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
    if (!find_file(api, runtime, "cpu_ref", resolved->reference, sizeof resolved->reference)) {
        status = tell_why_not(api, runtime, "cpu_ref", error);
    } else if (is_path(target)) {
        resolved->name = NULL;
        char *absolute = realpath(target, NULL);
        if (absolute == NULL || strlen(absolute) >= sizeof resolved->file) {
            status = fail(error, ATTN_ERROR_NOT_FOUND, "file", "'%s' cannot be opened", target);
        } else {
            strcpy(resolved->file, absolute);
        }
        free(absolute);
    } else {
        resolved->name = target;
        if (!find_file(api, runtime, target, resolved->file, sizeof resolved->file)) {
            status = tell_why_not(api, runtime, target, error);
        }
    }
    api->runtime_destroy(runtime);
    return status;
}
