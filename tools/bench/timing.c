/* SPDX-License-Identifier: Apache-2.0 */
#include "timing.h"

#include <stdlib.h>
#include <time.h>

#define SAMPLE_SECONDS 0.02 /* of calls in one sample, where calls are short */
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

/* The wall's, or what this process has taken of the processor for each of its threads. */
static double clock_seconds(const struct session *session)
{
    struct timespec now;
    if (!session->options->cpu_time) {
        return now_seconds();
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return ((double)now.tv_sec + 1e-9 * (double)now.tv_nsec) / session->num_threads;
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
    double begin = clock_seconds(caller->session);
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
    *elapsed = clock_seconds(caller->session) - begin;
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

/* What is kept of one contender between the rounds. */
struct lane {
    struct contender *contender;
    struct caller caller;
    double call_seconds;
    int64_t calls; /* of one sample */
    double times[MAX_SAMPLES], floors[MAX_SAMPLES];
};

static void conclude(struct lane *lane, int32_t count)
{
    const struct work *work = lane->contender->work;
    struct timing *timing = &lane->contender->timing;
    double bytes = work->bytes_read + work->bytes_written;
    double median = quantile(lane->times, count, 0.5);
    double range = quantile(lane->times, count, 0.75) - quantile(lane->times, count, 0.25);
    double least = quantile(lane->floors, count, 0.5);
    timing->num_samples = count;
    timing->num_calls = count * lane->calls;
    timing->time_us = 1e6 * median;
    timing->spread = median > 0 ? range / median : 0;
    timing->floor_us = 1e6 * least;
    timing->ratio_to_floor = least > 0 ? median / least : 0;
    timing->gb_s = median > 0 ? 1e-9 * bytes / median : 0;
    timing->tflop_s = median > 0 ? 1e-12 * work->operations / median : 0;
    timing->failed = !(timing->ratio_to_floor >= 1);
}

static double median_ratio(const struct lane *lane, const struct lane *first, int32_t count)
{
    double ratios[MAX_SAMPLES];
    for (int32_t i = 0; i < count; i++) {
        ratios[i] = lane->times[i] / first->times[i];
    }
    return quantile(ratios, count, 0.5);
}

static void warm_lane(struct lane *lane)
{
    struct contender *contender = lane->contender;
    contender->status = warm_up(&lane->caller, &lane->call_seconds, &contender->error);
    int64_t round = lane->caller.graph != NULL ? contender->work->num_copies : 1;
    lane->calls =
        lane->call_seconds > 0 ? (int64_t)(SAMPLE_SECONDS / lane->call_seconds) + 1 : 1000;
    lane->calls = (lane->calls + round - 1) / round * round;
}

static void take_sample(struct lane *lane, int32_t index)
{
    struct contender *contender = lane->contender;
    double elapsed = 0;
    if (contender->status != ATTN_OK) {
        return;
    }
    lane->floors[index] =
        floor_seconds(lane->caller.session, contender->work, &contender->timing.bound);
    contender->status = time_calls(&lane->caller, lane->calls, &elapsed, &contender->error);
    lane->times[index] = elapsed / (double)lane->calls;
}

/* Every other round goes the other way, so that none always follows the same one. */
static int32_t sample_rounds(struct lane *lanes, int32_t count, double budget)
{
    double begin = now_seconds(), slowest = 0;
    int32_t rounds = 0;
    for (int32_t i = 0; i < count; i++) {
        slowest = lanes[i].call_seconds > slowest ? lanes[i].call_seconds : slowest;
    }
    int32_t least = slowest > SLOW_SECONDS ? SLOW_SAMPLES : MIN_SAMPLES;
    int32_t most = slowest > SLOW_SECONDS ? SLOW_SAMPLES : MAX_SAMPLES;
    while (rounds < most && (rounds < least || now_seconds() - begin < budget * count)) {
        for (int32_t i = 0; i < count; i++) {
            take_sample(&lanes[rounds % 2 == 0 ? i : count - 1 - i], rounds);
        }
        rounds++;
    }
    return rounds;
}

void timing_measure(struct contender *contenders, int32_t count, struct session *session)
{
    struct lane *lanes = calloc((size_t)count, sizeof *lanes);
    struct attn_error error = ATTN_ERROR_INIT;
    int32_t running = 0, bound = 0;
    for (int32_t i = 0; i < count; i++) {
        bound += contenders[i].work != NULL;
    }
    attn_status status = lanes != NULL ? ATTN_OK : ATTN_ERROR_OUT_OF_MEMORY;
    if (status == ATTN_OK && bound > 0) {
        status = session_ceilings(session, &error);
    }
    for (int32_t i = 0; i < count; i++) {
        contenders[i].timing = (struct timing){.bound = ""};
        contenders[i].status = status;
        contenders[i].error = error;
        if (status == ATTN_OK && contenders[i].work != NULL) {
            struct lane *lane = &lanes[running++];
            lane->contender = &contenders[i];
            lane->caller = (struct caller){.session = session, .work = contenders[i].work};
            warm_lane(lane);
        }
    }
    int32_t rounds = running > 0 ? sample_rounds(lanes, running, session->options->budget) : 0;
    bool compared = count > 1 && contenders[0].work != NULL && contenders[0].status == ATTN_OK;
    for (int32_t i = 0; i < running && compared; i++) { /* before conclude sorts the times */
        lanes[i].contender->timing.ratio_to_first = median_ratio(&lanes[i], lanes, rounds);
    }
    for (int32_t i = 0; i < running; i++) {
        if (lanes[i].contender->status == ATTN_OK) {
            conclude(&lanes[i], rounds);
        }
        device_graph_finish(&session->device, lanes[i].caller.graph);
    }
    free(lanes);
}
