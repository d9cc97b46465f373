/* SPDX-License-Identifier: Apache-2.0 */
/* `dispatch`: a run through the core in turns with calls of the backend's own kernels over the same
 * tensors. */
#ifndef BENCH_DISPATCH_H
#define BENCH_DISPATCH_H

#include "report.h"

/* Completes `result` of a dispatch shape. */
attn_status dispatch_measure(struct result *result, struct session *session, const char *backend,
                             struct attn_error *error);
/* In a process that callgrind watches: `options->child` calls, "run" or "direct", of the first
 * shape. Gives the exit status. */
int dispatch_child(const struct options *options);

#endif
