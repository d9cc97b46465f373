/* SPDX-License-Identifier: Apache-2.0 */
/* A backend of a session's runtime without the core: its plugin's entry, an instance, its kernels,
 * and services as the core's own for them. */
#ifndef BENCH_DIRECT_H
#define BENCH_DIRECT_H

#include <attn/plugin.h>

#include "host/host.h"
#include "session.h"

struct direct {
    struct attn_host host;
    struct host_services services;
    const struct attn_plugin *plugin;
    attn_instance *instance;
    const struct attn_kernels *kernels;
};

/* `index` of the runtime's backend. Not to be moved; due to direct_close even after a failure. */
attn_status direct_open(struct direct *direct, const struct session *session, int32_t index,
                        struct attn_error *error);
void direct_close(struct direct *direct);

#endif
