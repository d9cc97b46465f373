/* SPDX-License-Identifier: Apache-2.0 */
#include "without_core.h"

#include "common/command.h"
#include "host/host.h"
#include "support/client.h"

static attn_status start_services(struct plugin_kernels *opened, int32_t num_threads,
                                  struct attn_error *error)
{
    num_threads = num_threads > 0 ? num_threads : 1;
    opened->services.log_level = ATTN_LOG_WARN;
    host_init(&opened->host, &opened->services, num_threads);
    opened->services.pool = pool_create(&opened->host, num_threads);
    if (opened->services.pool == NULL) {
        return command_error(error, ATTN_ERROR_OUT_OF_MEMORY, "", "%d threads cannot be started",
                             num_threads);
    }
    return ATTN_OK;
}

attn_status plugin_kernels_open(struct plugin_kernels *opened, const struct session *session,
                                int32_t index, struct attn_error *error)
{
    struct attn_backend_info backend = {.struct_size = sizeof backend};
    struct attn_plugin_info file = {.struct_size = sizeof file};
    *opened = (struct plugin_kernels){.plugin = NULL};
    session->api->backend_info(session->runtime, index, &backend);
    session->api->plugin_info(session->runtime, backend.plugin, &file);
    attn_status status =
        client_plugin(file.file, ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &opened->plugin, error);
    status = status ? status : start_services(opened, session->num_threads, error);
    if (status == ATTN_OK) {
        status = opened->plugin->create(
            &SIZED(attn_create_args, .host = &opened->host, .backend = backend.caps->name,
                   .variant = backend.caps->variant, .device = backend.caps->device),
            &opened->instance, &opened->kernels, error);
    }
    return status;
}

void plugin_kernels_close(struct plugin_kernels *opened)
{
    if (opened->instance != NULL) {
        opened->plugin->destroy(opened->instance);
    }
    pool_destroy(opened->services.pool);
    *opened = (struct plugin_kernels){.plugin = NULL};
}
