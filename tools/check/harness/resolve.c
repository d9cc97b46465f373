/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/resolve.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/find.h"
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
            status = fail(error, ATTN_ERROR_NOT_FOUND, "file", "'%s' cannot be opened", target);
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
