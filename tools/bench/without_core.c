/* SPDX-License-Identifier: Apache-2.0 */
#include "without_core.h"

#include "common/command.h"
#include "common/find.h"
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
    const struct attn_backend_caps *caps = backend_caps(session->api, session->runtime, index);
    const char *file = backend_file(session->api, session->runtime, index);
    *opened = (struct plugin_kernels){.plugin = NULL};
    TRY(client_plugin(file, ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &opened->plugin, error));
    TRY(start_services(opened, session->num_threads, error));
    return opened->plugin->create(&SIZED(attn_create_args, .host = &opened->host,
                                         .backend = caps->name, .variant = caps->variant,
                                         .device = caps->device),
                                  &opened->instance, &opened->kernels, error);
}

void plugin_kernels_close(struct plugin_kernels *opened)
{
    if (opened->instance != NULL) {
        opened->plugin->destroy(opened->instance);
    }
    pool_destroy(opened->services.pool);
    *opened = (struct plugin_kernels){.plugin = NULL};
}
