/* SPDX-License-Identifier: Apache-2.0 */
/* What is measured without the core: a backend's kernels by its plugin's entry, with services as
 * the core's own for them, and another library next to a backend. On failure nothing is left; else
 * the work's `destroy` is due. */
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

/* dispatch.c: `index` of the runtime's backend. Not to be moved; due to plugin_kernels_close even
 * after a failure. */
attn_status plugin_kernels_open(struct plugin_kernels *opened, const struct session *session,
                                int32_t index, struct attn_error *error);
void plugin_kernels_close(struct plugin_kernels *opened);

/* merge.c: merge_states of two outputs, which only the core calls otherwise. Names the backend in
 * `result`. */
attn_status merge_create(const struct work **work, struct result *result, struct session *session,
                         const char *backend, struct attn_error *error);

/* dispatch.c, too: the backend's own kernels over the tensors of a dispatch shape, which outlive
 * them.
 */
attn_status direct_calls_create(const struct work **work, struct measured *measured,
                                struct attn_error *error);
/* Puts into `result` what a run through the core adds to direct calls; both were timed. */
void dispatch_compare(struct result *result, const struct session *session,
                      const struct contender *run, const struct contender *direct);
/* In a process that callgrind watches: `options->child` calls, "run" or "direct", of the first
 * shape. Gives the exit status. */
int dispatch_child(const struct options *options);

/* peer_file.c: what --peer names, a file of peer.h's functions. */
struct peer_file {
    const char *(*name)(void);
    void *(*create)(const struct attn_layer_desc *, const struct attn_layer_params *,
                    const struct attn_batch *, char *);
    int (*bind)(void *, const struct attn_kv_view *, const struct attn_kv_view *,
                const struct attn_step_io *);
    int (*run)(void *, int32_t);
    void (*destroy)(void *);
};

attn_status peer_file_open(struct peer_file *file, const char *path, struct attn_error *error);
/* The peer on what `measured` holds, which outlives it. */
attn_status peer_create(const struct work **work, const struct peer_file *file,
                        const struct measured *measured, struct attn_error *error);

#endif
