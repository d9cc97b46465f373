/* SPDX-License-Identifier: Apache-2.0 */
/* A backend of a session's runtime without the core: its plugin's entry, an instance, the table of
 * kernels. */
#ifndef BENCH_DIRECT_H
#define BENCH_DIRECT_H

#include <attn/plugin.h>

#include "services.h"
#include "session.h"

struct direct {
    const struct attn_plugin *plugin;
    attn_instance *instance;
    const struct attn_kernels *kernels;
};

/* `index` of the runtime's backend; `host` outlives the instance. */
attn_status direct_open(struct direct *direct, const struct session *session, int32_t index,
                        const struct attn_host *host, struct attn_error *error);
void direct_close(struct direct *direct);

#endif
