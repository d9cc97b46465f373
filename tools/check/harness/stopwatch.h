/* SPDX-License-Identifier: Apache-2.0 */
/* How long a case's kernel takes: `attn-check --bench`. */
#ifndef CHECK_STOPWATCH_H
#define CHECK_STOPWATCH_H

#include "harness/trial.h"

#define STOPWATCH_MAX_RUNS 31

/* While a backend has one, it times the kernels that are called between begin and end. */
struct stopwatch {
    const struct device *device;
    double begun_at;
    double run_seconds; /* the kernels of this run */
    double runs[STOPWATCH_MAX_RUNS];
    int32_t num_runs;
    bool capturing; /* the call is recorded as a graph, which is timed in its place */
    bool no_graphs; /* the device has none, or the kernel cannot be captured */
};

/* Around one call of a kernel; without a stopwatch they do nothing. */
void stopwatch_begin(struct backend *backend, void *stream);
void stopwatch_end(struct backend *backend, void *stream);

/* With --bench: runs the case's call, with its kernels in it, again and again. The trial gets the
 * median of a run's kernels; no time where a run calls none. A run that fails fails the case. */
typedef attn_status stopwatch_run(void *user, struct attn_error *error);
enum trial_result stopwatch_trial(struct trial *trial, stopwatch_run *run, void *user);

#endif
