/* SPDX-License-Identifier: Apache-2.0 */
/* Cases run in a process of their own, so that a crash, an exit, an abort or an endless loop costs
 * the case that runs and no other: the next worker goes on after it. What a worker finds comes
 * through a pipe.
 */
#ifndef CHECK_WORKER_H
#define CHECK_WORKER_H

#include "harness/report.h"

/* Where results go: into a report, or through a pipe to the process that has it. */
struct outlet {
    struct report *report;
    int pipe; /* -1: the report is this process's */
};

/* Its messages, each with a number and up to two texts, which are copied. */
enum outlet_kind {
    OUTLET_CASE,     /* begins: its name */
    OUTLET_STAGE,    /* the same of something that has to go well before and after cases */
    OUTLET_RESULT,   /* enum trial_result, the case's name, a message */
    OUTLET_TIME,     /* after a result: what its kernels took, in microseconds, as text */
    OUTLET_DECLARED, /* the backend's name and its declaration as JSON */
    OUTLET_RECORD,   /* a line of host/conformance.h but for its counts */
    OUTLET_CRASH,    /* a worker's last words; its number: 1 for lack of memory, else 0 */
    OUTLET_END,      /* its value */
    OUTLET_KIND_COUNT
};
void outlet_put(const struct outlet *outlet, enum outlet_kind kind, int32_t value,
                const char *first, const char *second);

/* What a worker does: everything, but for the first `skip` counted cases. Its value is the exit
 * status that the tool would have. */
typedef int worker_run(void *user, const struct outlet *outlet, int32_t skip);

/* Runs workers until one comes to its end; how the others ended stands in the report. One is ended
 * whose case has taken case_seconds of processor time, or so long without working. Returns the last
 * one's value, EXIT_FAILURE where it did not end by itself. */
int workers_run(struct report *report, worker_run *run, void *user, int32_t case_seconds,
                bool fail_fast);

/* From now on a fatal signal ends the process with status 1, and its name, the address and the
 * buffer next to it are reported: through a worker's pipe, else on stderr with the case and the
 * command that repeats it under a debugger (`target` and `seed` of this run). */
void crash_watch(const char *target, uint64_t seed);
/* What runs, a case or not; borrowed until the next call. NULL: nothing. */
void crash_case(const char *name, bool is_case);

#endif
