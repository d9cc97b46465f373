/* SPDX-License-Identifier: Apache-2.0 */
/* `dispatch`: what the core adds to a direct call of the backend's own kernel. */
#ifndef BENCH_DISPATCH_H
#define BENCH_DISPATCH_H

#include "report.h"

attn_status dispatch_measure(struct result *result, struct session *session, const char *backend,
                             struct attn_error *error);
/* What a process measures that dispatch_measure started: `start`, or `run`, `direct`, `run_write`,
 * `direct_write`, which valgrind counts. Gives the exit status. */
int dispatch_child(const struct options *options);

#endif
