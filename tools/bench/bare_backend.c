/* SPDX-License-Identifier: Apache-2.0 */
#include "bare_backend.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

attn_status bare_backend_open(struct bare_backend *bare, const struct session *session,
                              int32_t index, const struct attn_host *host, struct attn_error *error)
{
    struct attn_backend_info backend = {.struct_size = sizeof backend};
    struct attn_plugin_info file = {.struct_size = sizeof file};
    attn_plugin_entry_fn *entry;
    *bare = (struct bare_backend){NULL, NULL, NULL};
    session->api->backend_info(session->runtime, index, &backend);
    session->api->plugin_info(session->runtime, backend.plugin, &file);
    void *library = dlopen(file.file, RTLD_NOW | RTLD_LOCAL); /* never closed, as the ABI has it */
    void *symbol = library != NULL ? dlsym(library, ATTN_PLUGIN_ENTRY_SYMBOL) : NULL;
    if (symbol == NULL) {
        const char *why = dlerror();
        snprintf(error->message, sizeof error->message, "%s", why != NULL ? why : file.file);
        return error->status = ATTN_ERROR_PLUGIN;
    }
    memcpy(&entry, &symbol, sizeof entry);
    attn_status status = entry(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &bare->plugin, error);
    if (status == ATTN_OK) {
        status = bare->plugin->create(
            &(struct attn_create_args){.struct_size = sizeof(struct attn_create_args),
                                       .host = host,
                                       .backend = backend.caps->name,
                                       .variant = backend.caps->variant,
                                       .device = backend.caps->device},
            &bare->instance, &bare->kernels, error);
    }
    return status;
}

void bare_backend_close(struct bare_backend *bare)
{
    if (bare->instance != NULL) {
        bare->plugin->destroy(bare->instance);
    }
    *bare = (struct bare_backend){NULL, NULL, NULL};
}
