/* SPDX-License-Identifier: Apache-2.0 */
#include "find.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "command.h"
#include "support/client.h"

#define CORE_NAME "libattn.so.1"

const char *const phase_names[] = {"prefill", "decode"};

/* The folder of this executable, ending in '/'; empty if it is not known. */
static void own_folder(char *folder, size_t size)
{
    ssize_t length = readlink("/proc/self/exe", folder, size - 1);
    folder[length > 0 ? length : 0] = '\0';
    char *slash = strrchr(folder, '/');
    if (slash != NULL) {
        slash[1] = '\0';
    }
}

attn_status library_open(const struct attn_api **api, struct attn_error *error)
{
    /* From build/tools/NAME, from an installed bin/NAME, in a wheel, by the loader's own search. */
    static const char *const places[] = {"../core/" CORE_NAME, "../" ATTN_LIBDIR "/" CORE_NAME,
                                         "../lib/" CORE_NAME, NULL};
    char folder[3072], path[4096];
    own_folder(folder, sizeof folder);
    for (int i = 0; places[i] != NULL && folder[0] != '\0'; i++) {
        /* a folder named core next to an installed tool's is nothing of ours */
        snprintf(path, sizeof path, "%s../meson-private/coredata.dat", folder);
        const bool readable = i > 0 || access(path, R_OK) == 0;
        snprintf(path, sizeof path, "%s%s", folder, places[i]);
        if (readable && access(path, R_OK) == 0) {
            return client_load(path, api, error);
        }
    }
    return client_load(CORE_NAME, api, error);
}

const struct attn_backend_caps *backend_caps(const struct attn_api *api,
                                             const attn_runtime *runtime, int32_t index)
{
    struct attn_backend_info backend = {.struct_size = sizeof backend};
    api->backend_info(runtime, index, &backend);
    return backend.caps;
}

const char *backend_file(const struct attn_api *api, const attn_runtime *runtime, int32_t index)
{
    struct attn_backend_info backend = {.struct_size = sizeof backend};
    struct attn_plugin_info plugin = {.struct_size = sizeof plugin};
    api->backend_info(runtime, index, &backend);
    api->plugin_info(runtime, backend.plugin, &plugin);
    return plugin.file;
}

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
        if (backend_is_named(backend_caps(api, runtime, i), name)) {
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

struct attn_choice choice_of(const struct attn_api *api, const attn_assignment *assignment,
                             int32_t layer, int32_t phase)
{
    struct attn_choice choice = {.struct_size = sizeof choice};
    api->assignment_choice(assignment, layer, phase, &choice);
    return choice;
}

void choice_text(const struct attn_api *api, const attn_assignment *assignment, int32_t layer,
                 char text[BACKEND_SIZE])
{
    const char *prefill = choice_of(api, assignment, layer, ATTN_PHASE_PREFILL).name;
    const char *decode = choice_of(api, assignment, layer, ATTN_PHASE_DECODE).name;
    const bool same = strcmp(prefill, decode) == 0;
    snprintf(text, BACKEND_SIZE, "%.78s%s%.78s", prefill, same ? "" : "/", same ? "" : decode);
}
