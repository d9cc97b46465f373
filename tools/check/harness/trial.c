/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/trial.h"
#include "support/client.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"

#define MIN_RUNS 3
#define ENOUGH_SECONDS 0.1 /* for one case, where it has had its least runs */
#define MOST_SECONDS 5     /* no further run then: a case's time is limited */
#define REPLAYS 20         /* so many launches of a graph make one run */
#define SLOW_SECONDS 0.005 /* one launch is a run */

enum trial_result trial_say(struct trial *trial, enum trial_result result, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(trial->message, sizeof trial->message, format, arguments);
    va_end(arguments);
    return result;
}

static const char *text_of(attn_status status)
{
    switch (status) {
#define TEXT_CASE(name, value, text)                                                               \
    case value:                                                                                    \
        return text;
        ATTN_STATUS_LIST(TEXT_CASE)
#undef TEXT_CASE
    default:
        return "unknown status";
    }
}

enum trial_result trial_call_failed(struct trial *trial, const char *what, attn_status status,
                                    const struct attn_error *error)
{
    const bool text = error->message[0] != '\0';
    return trial_say(trial, TRIAL_FAILED, "%s: status %d (%s)%s%s%s%s", what, status,
                     text_of(status), text ? ": " : ", without a text", text ? error->field : "",
                     text ? ": " : "", error->message);
}

enum trial_result trial_call_refused(struct trial *trial, const struct attn_error *error)
{
    const bool text = error->message[0] != '\0';
    return trial_say(trial, TRIAL_SKIPPED, "the kernel refused it%s%s%s%s",
                     text ? ": " : " as unsupported, without a text", text ? error->field : "",
                     text ? ": " : "", error->message);
}

uint8_t *trial_read(struct trial *trial, const struct device *device, const void *memory,
                    size_t bytes)
{
    uint8_t *read = command_calloc(bytes, 1);
    if (!device_read(device, read, memory, bytes)) {
        free(read);
        trial_say(trial, TRIAL_FAILED, "%zu bytes of the outputs cannot be read back", bytes);
        return NULL;
    }
    return read;
}

static void refuse(void *user, const char *field, const char *asked, const char *supported)
{
    struct trial *trial = user;
    snprintf(trial->message, sizeof trial->message, "refused: %s %s, supported: %s", field, asked,
             supported);
}

bool trial_supports(struct trial *trial, const struct backend *backend,
                    const struct attn_layer_desc *layer, int32_t phase)
{
    struct attn_reason_sink sink = {sizeof sink, NULL, trial, refuse};
    const struct attn_supports_args args =
        SIZED(attn_supports_args, .caps = &backend->caps, .layer = layer, .phase = phase);
    trial->message[0] = '\0';
    return backend->plugin->supports == NULL ||
           (backend->plugin->supports(&args, &sink, NULL) == ATTN_OK && trial->message[0] == '\0');
}

enum trial_result trial_of_layer(struct trial *trial, const struct attn_layer_desc *layer,
                                 enum trial_result result)
{
    const uint64_t features = trial->tested->caps.features;
    if (result != TRIAL_SKIPPED || layer->batch_invariant < 2 ||
        !(features & ATTN_FEATURE_BATCH_INVARIANT_PREFIX) ||
        strstr(trial->message, "batch_invariant") == NULL) {
        return result;
    }
    char why[sizeof trial->message];
    memcpy(why, trial->message, sizeof why);
    return trial_say(trial, TRIAL_FAILED, "BATCH_INVARIANT_PREFIX is declared; %.*s",
                     (int)sizeof why - 50, why);
}

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
