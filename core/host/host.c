/* SPDX-License-Identifier: Apache-2.0 */
#include "host/host.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "util/safe_text.h"

#define MAX_LINE 4096 /* bytes of a log's */

static void services_log(void *user, int32_t level, const char *who, const char *message)
{
    static const char *const names[] = {"error", "warn", "info", "debug", "trace"};
    const struct host_services *services = user;
    if (level > services->log_level) {
        return;
    }
    char safe_who[128], safe[MAX_LINE];
    snprintf(safe_who, sizeof safe_who, "%s", who != NULL ? who : "");
    snprintf(safe, sizeof safe, "%s", message != NULL ? message : "");
    text_make_safe(safe_who, false);
    text_make_safe(safe, false);
    if (services->engine.log != NULL) {
        services->engine.log(services->engine.user, level, safe_who, safe);
        return;
    }
    level = level < ATTN_LOG_ERROR ? ATTN_LOG_ERROR : level;
    level = level > ATTN_LOG_TRACE ? ATTN_LOG_TRACE : level;
    /* The engine asked for no log of its own: ATTN_LOG goes to stderr, one line in one call. */
    fprintf(stderr, "attn %s: %s: %s\n", names[level], safe_who, safe);
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

/* One loop of an engine that is watched. */
struct watched {
    struct host_services *services;
    attn_parallel_body *body;
    void *argument;
    int64_t count;
    _Atomic int64_t done; /* items */
};

static void note_wrong(struct host_services *services, enum host_wrong what, int64_t value)
{
    int64_t none = 0;
    atomic_compare_exchange_strong(&services->wrong, &none, (int64_t)what | value << 2);
}

enum host_wrong host_take_wrong(struct host_services *services, int64_t *value)
{
    int64_t wrong = atomic_exchange(&services->wrong, 0);
    *value = wrong >> 2;
    return (enum host_wrong)(wrong & 3);
}

/* A slice under a worker that no scratch memory was made for is not run. */
static void run_watched(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    struct watched *watched = argument;
    if (worker < 0 || worker >= watched->services->watched_threads) {
        note_wrong(watched->services, HOST_WRONG_WORKER, worker);
    } else if (begin < 0 || end > watched->count || begin > end) {
        note_wrong(watched->services, HOST_WRONG_ITEMS, begin < 0 ? begin : end);
    } else {
        watched->body(watched->argument, begin, end, worker);
    }
    atomic_fetch_add(&watched->done, end - begin);
}

static void pool_parallel_for(void *user, int64_t count, int64_t grain, attn_parallel_body *body,
                              void *argument)
{
    pool_run(((struct host_services *)user)->pool, count, grain, body, argument);
}

static void engine_parallel_for(void *user, int64_t count, int64_t grain, attn_parallel_body *body,
                                void *argument)
{
    const struct attn_host *engine = &((struct host_services *)user)->engine;
    engine->parallel_for(engine->user, count, grain, body, argument);
}

static void watched_parallel_for(void *user, int64_t count, int64_t grain, attn_parallel_body *body,
                                 void *argument)
{
    struct host_services *services = user;
    struct watched watched = {services, body, argument, count, 0};
    services->engine.parallel_for(services->engine.user, count, grain, run_watched, &watched);
    int64_t done = atomic_load(&watched.done);
    if (done != count) {
        note_wrong(services, HOST_WRONG_ITEMS, done);
    }
}

void host_choose_parallel_for(struct attn_host *host)
{
    const struct host_services *services = host->user;
    host->parallel_for = services->engine.parallel_for == NULL ? pool_parallel_for
                         : services->watched_threads == 0      ? engine_parallel_for
                                                               : watched_parallel_for;
}

void host_init(struct attn_host *host, struct host_services *services, int32_t num_threads)
{
    *host = (struct attn_host){.struct_size = sizeof *host,
                               .user = services,
                               .log = services_log,
                               .allocate = services_allocate,
                               .release = services_release,
                               .num_threads = num_threads,
                               .abi_version = ATTN_ABI_VERSION};
    host_choose_parallel_for(host);
}
