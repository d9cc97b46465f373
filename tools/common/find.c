/* SPDX-License-Identifier: Apache-2.0 */
#include "find.h"

#include <stdio.h>
#include <string.h>

#include "command.h"

bool backend_is_named(const struct attn_backend_caps *caps, const char *name)
{
    size_t length = strlen(caps->name);
    return strncmp(name, caps->name, length) == 0 &&
           (name[length] == '\0' ||
            (name[length] == '@' && strcmp(name + length + 1, caps->variant) == 0));
}

void backend_text(const struct attn_backend_caps *caps, char *text, size_t size)
{
    snprintf(text, size, "%s%s%s", caps->name, caps->variant[0] != '\0' ? "@" : "", caps->variant);
}

/* Whether `file` is attn_NAME.so, where `name` is NAME or NAME@VARIANT. */
static bool file_is_named(const char *file, const char *name)
{
    const char *slash = strrchr(file, '/'), *base = slash != NULL ? slash + 1 : file;
    size_t length = strcspn(name, "@");
    return length > 0 && strncmp(base, "attn_", 5) == 0 && strncmp(base + 5, name, length) == 0 &&
           strcmp(base + 5 + length, ".so") == 0;
}

int32_t backend_find(const struct attn_api *api, const attn_runtime *runtime, const char *name,
                     struct attn_error *error)
{
    for (int32_t i = 0; i < api->backend_count(runtime); i++) {
        struct attn_backend_info backend = {.struct_size = sizeof backend};
        if (api->backend_info(runtime, i, &backend) == ATTN_OK &&
            backend_is_named(backend.caps, name)) {
            return i;
        }
    }
    command_error(error, ATTN_ERROR_NOT_FOUND, "backend", "no backend is named '%s'", name);
    for (int32_t i = 0; i < api->plugin_count(runtime); i++) {
        struct attn_plugin_info plugin = {.struct_size = sizeof plugin};
        if (api->plugin_info(runtime, i, &plugin) == ATTN_OK && plugin.status != ATTN_OK &&
            file_is_named(plugin.file, name)) {
            command_error(error, plugin.status, plugin.file, "%s", plugin.reason);
            break;
        }
    }
    return -1;
}
