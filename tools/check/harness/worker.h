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

/* A case that begins, or (`counted` false) something that has to go well before and after cases.
 */
void outlet_begin(const struct outlet *outlet, const char *name, bool counted);
void outlet_result(const struct outlet *outlet, const char *name, enum trial_result result,
                   const char *message);
/* The backend's name and its declaration as JSON; both are copied. */
void outlet_describe(const struct outlet *outlet, const char *backend, const char *features);

/* A line of host/conformance.h but for its counts; copied. */
void outlet_record(const struct outlet *outlet, const char *line);

/* What a worker does: everything, but for the first `skip` counted cases. Its value is the exit
 * status that the tool would have. */
typedef int worker_run(void *user, const struct outlet *outlet, int32_t skip);

/* Runs workers until one comes to its end; how the others ended stands in the report. One is ended
 * whose case has taken case_seconds of processor time, or so long without working. Returns the last
 * one's value, EXIT_FAILURE where it did not end by itself. */
int workers_run(struct report *report, worker_run *run, void *user, int32_t case_seconds,
                bool fail_fast);

#endif
