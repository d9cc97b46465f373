/* SPDX-License-Identifier: Apache-2.0 */
#include "timing.h"

#include <stdlib.h>

#include "common/command.h"
#include "support/random.h"

#define SAMPLE_SECONDS 0.02 /* a sample has calls of so long, where they are short */
#define MIN_SAMPLES 7
#define MAX_SAMPLES 41
#define SLOW_SECONDS 2.0 /* a call as slow as this is sampled three times and no more */
#define SLOW_SAMPLES 3
/* part of the bytes that is read and written: a copy ceiling counts */
#define COPY_PART 0.05
#define QUEUED_CALLS 50 /* few enough for a stream's queue, where the host's part is timed */

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts; 0 of no values. `part` 0.5: the median. */
static double quantile(double *values, int32_t count, double part)
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
    return session->options->cpu_time ? seconds_of(CLOCK_PROCESS_CPUTIME_ID) / session->num_threads
                                      : seconds_of(CLOCK_MONOTONIC);
}

/* The samples of one contender, of calls of one copy after the other; on an accelerator of one
 * graph of a whole round, so that the host's part is not what is measured. */
struct sampler {
    struct session *session;
    struct contender *contender;
    const struct work *work; /* the contender's */
    int32_t next;
    void *graph; /* NULL: not captured */
    double call_seconds;
    int64_t calls; /* calls of one sample */
    double times[MAX_SAMPLES], floors[MAX_SAMPLES];
};

static void capture(struct sampler *s)
{
    const struct device *device = &s->session->device;
    attn_status status = ATTN_OK;
    if (s->work->host_only || !device_capture_begin(device, s->session->stream)) {
        return;
    }
    for (int32_t i = 0; i < s->work->num_copies && status == ATTN_OK; i++) {
        status = s->work->run(s->work->user, i, NULL);
    }
    s->graph = device_capture_end(device, s->session->stream);
    if (status != ATTN_OK) {
        device_graph_finish(device, s->graph);
        s->graph = NULL;
    }
}

/* Seconds of the host for `calls` calls, without the time that it waits. */
static attn_status time_host(struct sampler *s, int64_t calls, double *elapsed,
                             struct attn_error *error)
{
    const struct work *work = s->work;
    attn_status status = ATTN_OK;
    *elapsed = 0;
    for (int64_t done = 0; done < calls && status == ATTN_OK; done += QUEUED_CALLS) {
        int64_t end = done + QUEUED_CALLS < calls ? done + QUEUED_CALLS : calls;
        double begin = seconds_of(CLOCK_MONOTONIC);
        for (int64_t i = done; i < end && status == ATTN_OK; i++) {
            status = work->run(work->user, 0, error);
        }
        *elapsed += seconds_of(CLOCK_MONOTONIC) - begin;
        status = device_wait(&s->session->device) || status ? status : ATTN_ERROR_DEVICE;
    }
    return status;
}

/* Seconds of `calls` calls, until the device has done them. Whole rounds where they are captured.
 */
static attn_status time_calls(struct sampler *s, int64_t calls, double *elapsed,
                              struct attn_error *error)
{
    const struct device *device = &s->session->device;
    attn_status status = device_wait(device) ? ATTN_OK : ATTN_ERROR_DEVICE;
    if (status != ATTN_OK || s->work->host_only) {
        return status != ATTN_OK ? status : time_host(s, calls, elapsed, error);
    }
    double begin = clock_seconds(s->session);
    if (s->graph != NULL) {
        for (int64_t i = 0; i < calls && status == ATTN_OK; i += s->work->num_copies) {
            bool launched = device_graph_launch(device, s->graph, s->session->stream);
            status = launched ? ATTN_OK : ATTN_ERROR_DEVICE;
        }
    } else {
        for (int64_t i = 0; i < calls && status == ATTN_OK; i++) {
            status = s->work->run(s->work->user, s->next, error);
            s->next = (s->next + 1) % s->work->num_copies;
        }
    }
    status = device_wait(device) || status != ATTN_OK ? status : ATTN_ERROR_DEVICE;
    *elapsed = clock_seconds(s->session) - begin;
    return status;
}

/* A GPU slows a GEMM down to hold its power limit, which an attend of as many operations may not
 * reach: there the fastest pass of this process counts. */
static double operation_rate(struct session *session, enum ceiling ceiling)
{
    double rate = ceilings_measure(session->ceilings, ceiling);
    return session->device.device.type == ATTN_DEVICE_CPU ? rate : session->ceilings->best[ceiling];
}

static double floor_seconds(struct session *session, const struct work *work, const char **bound)
{
    struct ceilings *ceilings = session->ceilings;
    double both = work->bytes_read < work->bytes_written ? work->bytes_read : work->bytes_written;
    double all = work->bytes_read + work->bytes_written;
    double rate = 0, bytes = 0;
    if (work->operations > 0) {
        rate = operation_rate(session, work->arithmetic);
        rate = rate > 0 ? rate : operation_rate(session, CEILING_F32);
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
    const bool cpu = session->device.device.type == ATTN_DEVICE_CPU;
    double operations = rate > 0 ? (work->operations - (cpu ? 0 : work->narrow / 2)) / rate : 0;
    *bound = operations > bytes ? "operations" : "bytes";
    return operations > bytes ? operations : bytes;
}

/* Every copy once, or as many as two seconds allow; then how long a call takes, and how many make a
 * sample. */
static void warm_up(struct sampler *s)
{
    const double begin = seconds_of(CLOCK_MONOTONIC);
    double elapsed = 0;
    struct attn_error *error = &s->contender->error;
    attn_status status = ATTN_OK;
    for (int32_t i = 0; i < s->work->num_copies && status == ATTN_OK; i++) {
        status = time_calls(s, 1, &elapsed, error);
        if (seconds_of(CLOCK_MONOTONIC) - begin > SLOW_SECONDS) {
            break;
        }
    }
    if (status == ATTN_OK && elapsed < SLOW_SECONDS) {
        capture(s);
        const int64_t calls = s->graph != NULL ? s->work->num_copies : 1;
        status = time_calls(s, calls, &elapsed, error);
        elapsed /= (double)calls;
    }
    const int64_t round = s->graph != NULL ? s->work->num_copies : 1;
    s->call_seconds = elapsed;
    s->calls = elapsed > 0 ? (int64_t)(SAMPLE_SECONDS / elapsed) + 1 : 1000;
    s->calls = (s->calls + round - 1) / round * round;
    s->contender->status = status;
}

/* Ceilings take seconds, which --tune --model has better use for. */
static bool has_floor(const struct session *session, const struct work *work)
{
    return !work->host_only && session->options->model == NULL;
}

static void conclude(struct sampler *sampler, int32_t count)
{
    const struct work *work = sampler->work;
    struct timing *timing = &sampler->contender->timing;
    double bytes = work->bytes_read + work->bytes_written;
    double median = quantile(sampler->times, count, 0.5);
    double range = quantile(sampler->times, count, 0.75) - quantile(sampler->times, count, 0.25);
    double least = quantile(sampler->floors, count, 0.5);
    timing->num_samples = count;
    timing->num_calls = count * sampler->calls;
    timing->time_us = 1e6 * median;
    timing->spread = median > 0 ? range / median : 0;
    timing->floor_us = 1e6 * least;
    timing->ratio_to_floor = least > 0 ? median / least : 0;
    timing->gb_s = median > 0 ? 1e-9 * bytes / median : 0;
    timing->tflop_s = median > 0 ? 1e-12 * work->operations / median : 0;
    timing->failed = has_floor(sampler->session, work) && !(timing->ratio_to_floor >= 1);
}

static double median_ratio(const struct sampler *sampler, const struct sampler *first,
                           int32_t count)
{
    double ratios[MAX_SAMPLES];
    for (int32_t i = 0; i < count; i++) {
        ratios[i] = sampler->times[i] / first->times[i];
    }
    return quantile(ratios, count, 0.5);
}

static void take_sample(struct sampler *sampler, int32_t index)
{
    struct contender *contender = sampler->contender;
    double elapsed = 0;
    if (contender->status != ATTN_OK) {
        return;
    }
    if (has_floor(sampler->session, contender->work)) {
        sampler->floors[index] =
            floor_seconds(sampler->session, contender->work, &contender->timing.bound);
    }
    contender->status = time_calls(sampler, sampler->calls, &elapsed, &contender->error);
    sampler->times[index] = elapsed / (double)sampler->calls;
}

/* Each round goes in a random order, since what ran before a sample costs or spares it a part. */
static int32_t sample_rounds(struct sampler *samplers, int32_t count, double budget)
{
    double begin = seconds_of(CLOCK_MONOTONIC), slowest = 0;
    int32_t order[MAX_CONTENDERS], rounds = 0;
    uint64_t random = 1;
    for (int32_t i = 0; i < count; i++) {
        order[i] = i;
        slowest = samplers[i].call_seconds > slowest ? samplers[i].call_seconds : slowest;
    }
    int32_t least = slowest > SLOW_SECONDS ? SLOW_SAMPLES : MIN_SAMPLES;
    int32_t most = slowest > SLOW_SECONDS ? SLOW_SAMPLES : MAX_SAMPLES;
    while (rounds < most &&
           (rounds < least || seconds_of(CLOCK_MONOTONIC) - begin < budget * count)) {
        for (int32_t i = 0; i < count; i++) {
            int32_t other = i + random_below(&random, count - i), next = order[other];
            order[other] = order[i];
            order[i] = next;
            take_sample(&samplers[next], rounds);
        }
        rounds++;
    }
    return rounds;
}

void timing_measure(struct contender *contenders, int32_t count, struct session *session)
{
    struct sampler *samplers = command_calloc((size_t)count, sizeof *samplers);
    struct attn_error error = ATTN_ERROR_INIT;
    int32_t running = 0, bound = 0;
    for (int32_t i = 0; i < count; i++) {
        bound += contenders[i].work != NULL && has_floor(session, contenders[i].work);
    }
    const attn_status status = bound > 0 ? session_ceilings(session, &error) : ATTN_OK;
    for (int32_t i = 0; i < count; i++) {
        contenders[i].timing = (struct timing){.bound = ""};
        contenders[i].status = status;
        contenders[i].error = error;
        if (status == ATTN_OK && contenders[i].work != NULL) {
            struct sampler *sampler = &samplers[running++];
            *sampler = (struct sampler){
                .session = session, .contender = &contenders[i], .work = contenders[i].work};
            warm_up(sampler);
        }
    }
    int32_t rounds = running > 0 ? sample_rounds(samplers, running, session->options->budget) : 0;
    bool compared = count > 1 && contenders[0].work != NULL && contenders[0].status == ATTN_OK;
    for (int32_t i = 0; i < running && compared; i++) { /* before conclude sorts the times */
        samplers[i].contender->timing.ratio_to_first = median_ratio(&samplers[i], samplers, rounds);
    }
    for (int32_t i = 0; i < running; i++) {
        if (samplers[i].contender->status == ATTN_OK) {
            conclude(&samplers[i], rounds);
        }
        device_graph_finish(&session->device, samplers[i].graph);
    }
    free(samplers);
}
