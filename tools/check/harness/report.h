/* SPDX-License-Identifier: Apache-2.0 */
/* What a run of the suite found, and the forms in which it is reported. */
#ifndef CHECK_REPORT_H
#define CHECK_REPORT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "harness/trial.h"

struct report_line {
    char *name;
    char *message; /* NULL: passed */
    enum trial_result result;
    double us; /* what its kernels took; 0: not timed */
};

struct report {
    char *backend, *features; /* its name, and what it declares as JSON; NULL: not known yet */
    char *record;             /* a line of conformance.h without counts; NULL: none is written */
    const char *target;       /* what was named on the command line; borrowed */
    const char *junit;        /* file, written as results come; NULL: none; borrowed */
    FILE *junit_file;
    bool progress; /* on stderr */
    uint64_t seed;
    bool full;  /* --full */
    bool bench; /* --bench: the document has times */
    struct report_line *lines;
    int32_t num_lines;
    int32_t counts[3]; /* by enum trial_result */
};

static inline bool report_passed(const struct report *report)
{
    return report->counts[TRIAL_FAILED] == 0 && report->counts[TRIAL_PASSED] > 0;
}

void report_finish(struct report *report);
/* Both are copied. */
void report_describe(struct report *report, const char *backend, const char *features);
void report_record(struct report *report, const char *line);
void report_add(struct report *report, const char *name, enum trial_result result,
                const char *message);
/* What the kernels of the case took that was added last. */
void report_time(struct report *report, double us);
/* One JSON document on stdout. */
void report_json(const struct report *report);
void report_text(const struct report *report);
/* A document of shields.io's endpoint: the backend, how many of its cases passed, and a colour.
 * False: the file cannot be written. */
bool report_badge(const struct report *report, const char *file);
/* The file in full, with the counts. What stands there while cases run is a whole document, too. */
bool report_junit(struct report *report);

#endif
