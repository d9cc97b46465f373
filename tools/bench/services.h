/* SPDX-License-Identifier: Apache-2.0 */
/* Host services for kernels that are called without the core: the core's own, threads included. */
#ifndef BENCH_SERVICES_H
#define BENCH_SERVICES_H

#include <attn/host.h>

struct services;

/* NULL without memory. One thread: loops run in the caller's. */
struct services *services_create(int32_t num_threads);
void services_destroy(struct services *services); /* accepts NULL */
/* Borrowed; lives as long as the services. */
const struct attn_host *services_host(const struct services *services);

#endif
