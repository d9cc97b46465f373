/* SPDX-License-Identifier: Apache-2.0 */
/* What an earlier run recorded by --csv, next to today's: times over the floors of their own runs,
 * so that a ceiling that has changed is no slower kernel. */
#ifndef BENCH_BASELINE_H
#define BENCH_BASELINE_H

#include "report.h"

struct baseline {
    char *text; /* NULL: no file was given */
};

attn_status baseline_open(struct baseline *baseline, const char *path, struct attn_error *error);
void baseline_finish(struct baseline *baseline);

/* Sets ratio_to_baseline of a result that was measured, and `regression` where it takes longer by
 * more than both spreads and a twentieth, or where the file lacks it. */
void baseline_compare(const struct baseline *baseline, const char *path, struct result *result,
                      const struct session *session);

#endif
