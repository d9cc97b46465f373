/* SPDX-License-Identifier: Apache-2.0 */
#include "timing.h"

#include <stdlib.h>
#include <time.h>

#define SAMPLE_SECONDS 0.02 /* of calls in one sample, where calls are short */
#define BUDGET_SECONDS 3.0  /* of calls and ceilings in all */
#define MIN_SAMPLES 7
#define MAX_SAMPLES 41
#define SLOW_SECONDS 2.0 /* a call as slow as this is sampled three times and no more */
#define SLOW_SAMPLES 3
#define COPY_PART 0.05 /* of the bytes being both read and written: a copy ceiling counts */

double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double quantile(double *values, int32_t count, double part)
{
    if (count == 0) {
        return 0;
    }
    qsort(values, (size_t)count, sizeof *values, compare);
    double at = part * (count - 1);
    int32_t below = (int32_t)at;
    double next = below + 1 < count ? values[below + 1] : values[below];
    return values[below] + (at - below) * (next - values[below]);
}

/* Calls one copy after the other; on an accelerator as one graph of a whole round, so that the
 * host's part is not what is measured. */
struct caller {
    struct session *session;
    const struct work *work;
    int32_t next;
    void *graph; /* NULL: not captured */
};

static void capture(struct caller *caller)
{
    const struct device *device = &caller->session->device;
    attn_status status = ATTN_OK;
    if (!device_capture_begin(device, caller->session->stream)) {
        return;
    }
    for (int32_t i = 0; i < caller->work->num_copies && status == ATTN_OK; i++) {
        status = caller->work->run(caller->work->user, i, NULL);
    }
    caller->graph = device_capture_end(device, caller->session->stream);
    if (status != ATTN_OK) {
        device_graph_finish(device, caller->graph);
        caller->graph = NULL;
    }
}

/* Seconds of `calls` calls, until the device has done them. Whole rounds where they are captured.
 */
static attn_status time_calls(struct caller *caller, int64_t calls, double *elapsed,
                              struct attn_error *error)
{
    const struct device *device = &caller->session->device;
    attn_status status = device_wait(device) ? ATTN_OK : ATTN_ERROR_DEVICE;
    double begin = now_seconds();
    if (caller->graph != NULL) {
        for (int64_t i = 0; i < calls && status == ATTN_OK; i += caller->work->num_copies) {
            bool launched = device_graph_launch(device, caller->graph, caller->session->stream);
            status = launched ? ATTN_OK : ATTN_ERROR_DEVICE;
        }
    } else {
        for (int64_t i = 0; i < calls && status == ATTN_OK; i++) {
            status = caller->work->run(caller->work->user, caller->next, error);
            caller->next = (caller->next + 1) % caller->work->num_copies;
        }
    }
    status = device_wait(device) || status != ATTN_OK ? status : ATTN_ERROR_DEVICE;
    *elapsed = now_seconds() - begin;
    return status;
}

static double floor_seconds(struct session *session, const struct work *work, const char **bound)
{
    struct ceilings *ceilings = session->ceilings;
    double both = work->bytes_read < work->bytes_written ? work->bytes_read : work->bytes_written;
    double all = work->bytes_read + work->bytes_written;
    double rate = 0, bytes = 0;
    if (work->operations > 0) {
        rate = ceilings_measure(ceilings, work->arithmetic);
        rate = rate > 0 ? rate : ceilings_measure(ceilings, CEILING_F32);
    }
    if (work->near) {
        bytes = 0;
    } else if (2 * both > COPY_PART * all || work->bytes_written > work->bytes_read) {
        double read = work->bytes_read - both;
        bytes = (all - read) / ceilings_measure(ceilings, CEILING_COPY);
        bytes += read > 0 ? read / ceilings_measure(ceilings, CEILING_READ) : 0;
    } else {
        bytes = all / ceilings_measure(ceilings, CEILING_READ);
    }
    double operations = rate > 0 ? work->operations / rate : 0;
    *bound = operations > bytes ? "operations" : "bytes";
    return operations > bytes ? operations : bytes;
}

/* Every copy once, or as many as two seconds allow; then how long a call takes. */
static attn_status warm_up(struct caller *caller, double *call_seconds, struct attn_error *error)
{
    double begin = now_seconds(), elapsed = 0;
    attn_status status = ATTN_OK;
    for (int32_t i = 0; i < caller->work->num_copies && status == ATTN_OK; i++) {
        status = time_calls(caller, 1, &elapsed, error);
        if (now_seconds() - begin > SLOW_SECONDS) {
            break;
        }
    }
    if (status == ATTN_OK && elapsed < SLOW_SECONDS) {
        capture(caller);
        int64_t calls = caller->graph != NULL ? caller->work->num_copies : 1;
        status = time_calls(caller, calls, &elapsed, error);
        elapsed /= (double)calls;
    }
    *call_seconds = elapsed;
    return status;
}

static void conclude(struct timing *timing, const struct work *work, double *times, double *floors,
                     int32_t count)
{
    double bytes = work->bytes_read + work->bytes_written;
    double median = quantile(times, count, 0.5);
    double range = quantile(times, count, 0.75) - quantile(times, count, 0.25);
    double least = quantile(floors, count, 0.5);
    timing->num_samples = count;
    timing->time_us = 1e6 * median;
    timing->spread = median > 0 ? range / median : 0;
    timing->floor_us = 1e6 * least;
    timing->ratio_to_floor = least > 0 ? median / least : 0;
    timing->gb_s = median > 0 ? 1e-9 * bytes / median : 0;
    timing->tflop_s = median > 0 ? 1e-12 * work->operations / median : 0;
    timing->failed = !(timing->ratio_to_floor >= 1);
}

static attn_status sample(struct timing *timing, struct caller *caller, double call_seconds,
                          struct attn_error *error)
{
    double times[MAX_SAMPLES], floors[MAX_SAMPLES];
    int64_t round = caller->graph != NULL ? caller->work->num_copies : 1;
    int64_t calls = call_seconds > 0 ? (int64_t)(SAMPLE_SECONDS / call_seconds) + 1 : 1000;
    int32_t least = call_seconds > SLOW_SECONDS ? SLOW_SAMPLES : MIN_SAMPLES;
    double begin = now_seconds();
    attn_status status = ATTN_OK;
    int32_t count = 0;
    calls = (calls + round - 1) / round * round;
    while (count < MAX_SAMPLES && status == ATTN_OK &&
           (count < least || now_seconds() - begin < BUDGET_SECONDS)) {
        double elapsed;
        floors[count] = floor_seconds(caller->session, caller->work, &timing->bound);
        status = time_calls(caller, calls, &elapsed, error);
        times[count++] = elapsed / (double)calls;
        timing->num_calls += calls;
        if (count >= SLOW_SAMPLES && call_seconds > SLOW_SECONDS) {
            break;
        }
    }
    conclude(timing, caller->work, times, floors, count);
    return status;
}

attn_status timing_measure(struct timing *timing, struct session *session, const struct work *work,
                           struct attn_error *error)
{
    struct caller caller = {.session = session, .work = work};
    double call_seconds = 0;
    *timing = (struct timing){.bound = ""};
    attn_status status = session_ceilings(session, error);
    status = status == ATTN_OK ? warm_up(&caller, &call_seconds, error) : status;
    status = status == ATTN_OK ? sample(timing, &caller, call_seconds, error) : status;
    device_graph_finish(&session->device, caller.graph);
    return status;
}
