/* SPDX-License-Identifier: Apache-2.0 */
/* A backend of a session's runtime without the core: its plugin's entry, an instance, its kernels,
 * and services as the core's own for them; and what is measured of that. */
#ifndef BENCH_WITHOUT_CORE_H
#define BENCH_WITHOUT_CORE_H

#include <attn/plugin.h>

#include "host/host.h"
#include "measured.h"
#include "report.h"

struct plugin_kernels {
    struct attn_host host;
    struct host_services services;
    const struct attn_plugin *plugin;
    attn_instance *instance;
    const struct attn_kernels *kernels;
};

/* `index` of the runtime's backend. Not to be moved; due to plugin_kernels_close even after a
 * failure. */
attn_status plugin_kernels_open(struct plugin_kernels *opened, const struct session *session,
                                int32_t index, struct attn_error *error);
void plugin_kernels_close(struct plugin_kernels *opened);

/* merge.c: merge_states of two outputs, which only the core calls otherwise. */
struct merge;

/* Names the backend in `result`. NULL with the reason in `error`. */
struct merge *merge_create(struct result *result, struct session *session, const char *backend,
                           struct attn_error *error);
const struct work *merge_work(const struct merge *merge);
void merge_destroy(struct merge *merge); /* accepts NULL */

/* dispatch.c: the backend's own kernels over the tensors of a dispatch shape, which outlive them;
 * the calls, NULL with the reason in `error`. *made is due to direct_calls_destroy in either case.
 */
struct direct_calls;
const struct work *direct_calls_create(struct direct_calls **made, struct measured *measured,
                                       struct attn_error *error);
void direct_calls_destroy(struct direct_calls *calls); /* accepts NULL */
/* Puts into `result` what a run through the core adds to direct calls; both were timed. */
void dispatch_compare(struct result *result, const struct session *session,
                      const struct contender *run, const struct contender *direct);
/* In a process that callgrind watches: `options->child` calls, "run" or "direct", of the first
 * shape. Gives the exit status. */
int dispatch_child(const struct options *options);

#endif
