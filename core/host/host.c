/* SPDX-License-Identifier: Apache-2.0 */
#include "host/host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host/pool.h"

#define CORE_ALIGNMENT 64

static void services_log(void *user, int32_t level, const char *who, const char *message)
{
    static const char *const names[] = {"error", "warn", "info", "debug", "trace"};
    const struct host_services *services = user;

    if (level > services->log_level) {
        return;
    }
    who = who != NULL ? who : "";
    message = message != NULL ? message : "";
    if (services->engine.log != NULL) {
        services->engine.log(services->engine.user, level, who, message);
        return;
    }
    level = level < ATTN_LOG_ERROR ? ATTN_LOG_ERROR : level;
    level = level > ATTN_LOG_TRACE ? ATTN_LOG_TRACE : level;
    /* The engine asked for no log of its own: ATTN_LOG goes to stderr, one line in one call. */
    fprintf(stderr, "attn %s: %s: %s\n", names[level], who, message);
}

static void *services_allocate(void *user, size_t size, size_t alignment)
{
    const struct host_services *services = user;

    if (services->engine.allocate != NULL) {
        return services->engine.allocate(services->engine.user, size, alignment);
    }
    if (size == 0 || alignment == 0 || size > SIZE_MAX - alignment) {
        return NULL;
    }
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void services_release(void *user, void *memory, size_t size)
{
    const struct host_services *services = user;

    if (services->engine.allocate != NULL) {
        if (services->engine.release != NULL && memory != NULL) {
            services->engine.release(services->engine.user, memory, size);
        }
        return;
    }
    free(memory);
}

static void services_parallel_for(void *user, int64_t count, int64_t grain,
                                  attn_parallel_body *body, void *argument)
{
    const struct host_services *services = user;

    if (services->engine.parallel_for != NULL) {
        services->engine.parallel_for(services->engine.user, count, grain, body, argument);
    } else {
        pool_run(services->pool, count, grain, body, argument);
    }
}

void host_init(struct attn_host *host, struct host_services *services, int32_t num_threads)
{
    memset(host, 0, sizeof *host);
    host->struct_size = sizeof *host;
    host->user = services;
    host->log = services_log;
    host->allocate = services_allocate;
    host->release = services_release;
    host->parallel_for = services_parallel_for;
    host->num_threads = num_threads;
}

void *host_alloc(const struct attn_host *host, size_t size)
{
    void *memory = NULL;

    if (size == 0) {
        return NULL;
    }
    memory = host->allocate(host->user, size, CORE_ALIGNMENT);
    if (memory != NULL) {
        memset(memory, 0, size);
    }
    return memory;
}

void host_free(const struct attn_host *host, void *memory, size_t size)
{
    if (memory != NULL) {
        host->release(host->user, memory, size);
    }
}
