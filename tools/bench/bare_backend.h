/* SPDX-License-Identifier: Apache-2.0 */
/* A backend of a session's runtime without the core: its plugin's entry, an instance, the table of
 * kernels. */
#ifndef BENCH_BARE_BACKEND_H
#define BENCH_BARE_BACKEND_H

#include <attn/plugin.h>

#include "services.h"
#include "session.h"

struct bare_backend {
    const struct attn_plugin *plugin;
    attn_instance *instance;
    const struct attn_kernels *kernels;
};

/* `index` of the runtime's backend; `host` outlives the instance. */
attn_status bare_backend_open(struct bare_backend *bare, const struct session *session,
                              int32_t index, const struct attn_host *host,
                              struct attn_error *error);
void bare_backend_close(struct bare_backend *bare);

#endif
