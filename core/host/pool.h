/* SPDX-License-Identifier: Apache-2.0 */
/* The default parallel_for: a pool of threads, started at first use and again after a fork. */
#ifndef CORE_HOST_POOL_H
#define CORE_HOST_POOL_H

#include <attn/host.h>

struct pool;

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
