/* SPDX-License-Identifier: Apache-2.0 */
/* `merge`: a kernel that engines reach through cascades only, so it is called as the core calls it.
 */
#ifndef BENCH_MERGE_H
#define BENCH_MERGE_H

#include "report.h"

attn_status merge_measure(struct result *result, struct session *session, const char *backend,
                          struct attn_error *error);

#endif
