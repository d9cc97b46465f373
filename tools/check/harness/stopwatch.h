/* SPDX-License-Identifier: Apache-2.0 */
/* How long a case's kernel takes: `attn-check --bench`. */
#ifndef CHECK_STOPWATCH_H
#define CHECK_STOPWATCH_H

#include "common/device.h"

struct backend;

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

/* Runs the case's call, with its kernels in it, again and again. Returns the median of a run's
 * kernels in microseconds; 0 where a run fails or calls no kernel. */
typedef attn_status stopwatch_run(void *user, struct attn_error *error);
double stopwatch_time(struct backend *backend, const struct device *device, stopwatch_run *run,
                      void *user);

#endif
