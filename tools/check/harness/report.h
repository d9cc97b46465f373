/* SPDX-License-Identifier: Apache-2.0 */
/* What a run of the suite found, and the forms in which it is reported. */
#ifndef CHECK_REPORT_H
#define CHECK_REPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "harness/trial.h"

struct report_line {
    char *name;
    char *message; /* NULL: passed */
    enum trial_result result;
};

struct report {
    const char *backend; /* borrowed */
    const char *target;  /* what was named on the command line; borrowed */
    uint64_t seed;
    struct report_line *lines;
    int32_t num_lines;
    int32_t counts[3]; /* by enum trial_result */
    bool failed;       /* no memory: the report is not complete */
};

void report_finish(struct report *report);
void report_add(struct report *report, const char *name, enum trial_result result,
                const char *message);
/* One JSON document on stdout. */
bool report_json(const struct report *report, const struct attn_backend_caps *caps);
void report_text(const struct report *report);
bool report_junit(const struct report *report, const char *file);

#endif
