/* SPDX-License-Identifier: Apache-2.0 */
#include "without_core.h"

#include "common/command.h"
#include "host/host.h"
#include "support/client.h"

static attn_status start_services(struct plugin_kernels *direct, int32_t num_threads,
                                  struct attn_error *error)
{
    num_threads = num_threads > 0 ? num_threads : 1;
    direct->services.log_level = ATTN_LOG_WARN;
    host_init(&direct->host, &direct->services, num_threads);
    direct->services.pool = pool_create(&direct->host, num_threads);
    if (direct->services.pool == NULL) {
        return command_error(error, ATTN_ERROR_OUT_OF_MEMORY, "", "%d threads cannot be started",
                             num_threads);
    }
    return ATTN_OK;
}

attn_status plugin_kernels_open(struct plugin_kernels *direct, const struct session *session,
                                int32_t index, struct attn_error *error)
{
    struct attn_backend_info backend = {.struct_size = sizeof backend};
    struct attn_plugin_info file = {.struct_size = sizeof file};
    *direct = (struct plugin_kernels){.plugin = NULL};
    session->api->backend_info(session->runtime, index, &backend);
    session->api->plugin_info(session->runtime, backend.plugin, &file);
    attn_status status =
        client_plugin(file.file, ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &direct->plugin, error);
    status = status ? status : start_services(direct, session->num_threads, error);
    if (status == ATTN_OK) {
        status = direct->plugin->create(
            &SIZED(attn_create_args, .host = &direct->host, .backend = backend.caps->name,
                   .variant = backend.caps->variant, .device = backend.caps->device),
            &direct->instance, &direct->kernels, error);
    }
    return status;
}

void plugin_kernels_close(struct plugin_kernels *direct)
{
    if (direct->instance != NULL) {
        direct->plugin->destroy(direct->instance);
    }
    pool_destroy(direct->services.pool);
    *direct = (struct plugin_kernels){.plugin = NULL};
}
