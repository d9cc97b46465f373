/* SPDX-License-Identifier: Apache-2.0 */
#include "services.h"

#include <stdlib.h>

#include "host/host.h"
#include "host/pool.h"

struct services {
    struct attn_host host;
    struct host_services core;
};

struct services *services_create(int32_t num_threads)
{
    struct services *services = calloc(1, sizeof *services);
    num_threads = num_threads > 0 ? num_threads : 1;
    if (services == NULL) {
        return NULL;
    }
    services->core.log_level = ATTN_LOG_WARN;
    host_init(&services->host, &services->core, num_threads);
    services->core.pool = pool_create(&services->host, num_threads);
    if (services->core.pool == NULL) {
        services_destroy(services);
        return NULL;
    }
    return services;
}

void services_destroy(struct services *services)
{
    if (services != NULL) {
        pool_destroy(services->core.pool);
        free(services);
    }
}

const struct attn_host *services_host(const struct services *services)
{
    return &services->host;
}
