/* SPDX-License-Identifier: Apache-2.0 */
/* Host services: what the engine lends, completed with the core's own. */
#ifndef CORE_HOST_HOST_H
#define CORE_HOST_HOST_H

#include <stdatomic.h>

#include "util/arena.h"
#include "util/error.h"

struct pool;

/* What `user` of a completed host points to. Must not move while the host is used. */
struct host_services {
    struct attn_host engine; /* slots may be NULL */
    struct pool *pool;       /* needed iff engine.parallel_for is NULL */
    int32_t log_level;       /* enum attn_log_level: what passes */
    /* ATTN_VALIDATE=1: what the engine's parallel_for hands out is checked against num_threads; 0:
     * not */
    int32_t watched_threads;
    /* the first wrong one since host_take_wrong_worker; 0: none */
    _Atomic int64_t wrong;
};

enum host_wrong { HOST_WRONG_NONE = 0, HOST_WRONG_WORKER = 1, HOST_WRONG_ITEMS = 2 };

/* What the engine's parallel_for did wrong since the last call: handed out a worker that is not
 * below num_threads (*value is it), or not every item once (*value is how many). */
enum host_wrong host_take_wrong(struct host_services *services, int64_t *value);

/* Makes `host` a full table over `services`. */
void host_init(struct attn_host *host, struct host_services *services, int32_t num_threads);
/* Sets host->parallel_for by its services: the engine's, watched or not, or the pool. */
void host_choose_parallel_for(struct attn_host *host);

/* `num_threads` >= 1 counts the caller. `host`'s allocate and release are used here and in destroy
 * only. NULL without memory. */
struct pool *pool_create(const struct attn_host *host, int32_t num_threads);
/* Joins the threads; accepts NULL. No loop may be running. */
void pool_destroy(struct pool *pool);
/* As attn_host.parallel_for, from any number of threads: one caller at a time gets the pool, the
 * others (and nested loops) run in their own thread. */
void pool_run(struct pool *pool, int64_t count, int64_t grain, attn_parallel_body *body,
              void *argument);

#endif
