/* SPDX-License-Identifier: Apache-2.0 */
/* `merge`: merge_states of two outputs, a kernel that engines reach through cascades only. It is
 * called without the core, by an instance of the backend's plugin. */
#ifndef BENCH_MERGE_H
#define BENCH_MERGE_H

#include "report.h"

struct merge;

/* Names the backend in `result`. NULL with the reason in `error`. */
struct merge *merge_create(struct result *result, struct session *session, const char *backend,
                           struct attn_error *error);
const struct work *merge_work(const struct merge *merge);
void merge_destroy(struct merge *merge); /* accepts NULL */

#endif
