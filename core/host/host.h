/* SPDX-License-Identifier: Apache-2.0 */
/* Host services: what the engine lends, completed with the core's own. */
#ifndef CORE_HOST_HOST_H
#define CORE_HOST_HOST_H

#include <attn/host.h>

#include "util/error.h"

struct pool;

/* What stands behind `user` of a completed host. Must not move while the host is used. */
struct host_services {
    struct attn_host engine; /* slots may be NULL */
    struct pool *pool;       /* needed iff engine.parallel_for is NULL */
    int32_t log_level;       /* enum attn_log_level: what passes */
};

/* Makes `host` a full table over `services`. */
void host_init(struct attn_host *host, struct host_services *services, int32_t num_threads);

/* Zeroed, aligned to 64; NULL for size 0 or without memory. */
void *host_alloc(const struct attn_host *host, size_t size);
void host_free(const struct attn_host *host, void *memory, size_t size);

#endif
