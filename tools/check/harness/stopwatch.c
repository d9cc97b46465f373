/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/stopwatch.h"

#include <stdlib.h>

#include "common/seconds.h"
#include "harness/backend.h"

#define MIN_RUNS 3
#define ENOUGH_SECONDS 0.1 /* for one case, where it has had its least runs */
#define MOST_SECONDS 5     /* no further run then: a case's time is limited */
#define REPLAYS 20         /* so many launches of a graph make one run */
#define SLOW_SECONDS 0.005 /* one launch is a run */

void stopwatch_begin(struct backend *backend, void *stream)
{
    struct stopwatch *s = backend->stopwatch;
    if (s != NULL) {
        device_wait(s->device);
        s->capturing = !s->no_graphs && device_capture_begin(s->device, stream);
        s->begun_at = seconds_of(CLOCK_MONOTONIC);
    }
}

void stopwatch_end(struct backend *backend, void *stream)
{
    struct stopwatch *s = backend->stopwatch;
    void *graph = NULL;
    int32_t replays = 1;
    if (s == NULL) {
        return;
    }
    if (s->capturing) {
        graph = device_capture_end(s->device, stream);
        s->no_graphs = graph == NULL || !device_graph_launch(s->device, graph, stream) ||
                       !device_wait(s->device);
        const double first_at = s->begun_at;
        s->begun_at = seconds_of(CLOCK_MONOTONIC);
        replays = s->begun_at - first_at < SLOW_SECONDS ? REPLAYS : 1;
        for (int32_t i = 0; i < replays && !s->no_graphs; i++) {
            s->no_graphs = !device_graph_launch(s->device, graph, stream);
        }
    }
    device_wait(s->device);
    s->run_seconds += (seconds_of(CLOCK_MONOTONIC) - s->begun_at) / replays;
    device_graph_finish(s->device, graph);
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

enum trial_result stopwatch_trial(struct trial *trial, stopwatch_run *run, void *user)
{
    struct stopwatch s = {.device = trial->device};
    const double begun_at = seconds_of(CLOCK_MONOTONIC);
    struct attn_error error = ATTN_ERROR_INIT;
    attn_status status = ATTN_OK;
    bool goes_on = trial->bench;
    trial->tested->stopwatch = trial->bench ? &s : NULL;
    while (goes_on && s.num_runs < STOPWATCH_MAX_RUNS &&
           seconds_of(CLOCK_MONOTONIC) - begun_at <
               (s.num_runs < MIN_RUNS ? MOST_SECONDS : ENOUGH_SECONDS)) {
        const bool had_graphs = !s.no_graphs;
        s.run_seconds = 0;
        status = run(user, &error);
        if (had_graphs && s.no_graphs) {
            status = ATTN_OK; /* once more, without a graph */
        } else if (status == ATTN_OK && s.run_seconds > 0) {
            s.runs[s.num_runs++] = s.run_seconds;
        } else {
            goes_on = false;
        }
    }
    trial->tested->stopwatch = NULL;
    TRIAL_CALL(trial, "a timed run", status, &error);
    qsort(s.runs, (size_t)s.num_runs, sizeof *s.runs, compare);
    trial->us = goes_on ? 1e6 * s.runs[s.num_runs / 2] : 0;
    return TRIAL_PASSED;
}
