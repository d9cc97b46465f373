/* SPDX-License-Identifier: Apache-2.0 */
/* Host services of this tool, for kernels that are called without the core. */
#ifndef BENCH_POOL_H
#define BENCH_POOL_H

#include <attn/host.h>
#include <stdbool.h>

struct pool;

/* NULL if the threads cannot be started. One thread: loops run in the caller's. */
struct pool *pool_create(int32_t num_threads);
void pool_destroy(struct pool *pool);
/* Borrowed; lives as long as the pool. */
const struct attn_host *pool_host(const struct pool *pool);

#endif
