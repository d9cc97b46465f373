/* SPDX-License-Identifier: Apache-2.0 */
/* The time of a work next to the floor that the ceilings set. */
#ifndef BENCH_TIMING_H
#define BENCH_TIMING_H

#include "session.h"

#define MAX_CONTENDERS (2 * MAX_BACKENDS + 1)

/* One thing to time: a call over one of several copies of its data, and what it moves and
 * computes. */
struct work {
    double bytes_read; /* one call's; no byte counts twice */
    double bytes_written;
    double operations; /* a multiply and an add are two */
    enum ceiling arithmetic;
    double narrow; /* as many have operands of 8 bits, which a GPU multiplies at twice the rate */
    int32_t num_copies; /* one after the other, they push each other out of the caches */
    bool near;          /* one copy, which the caches may hold: its bytes make no floor */
    bool host_only; /* one copy; what the host takes for a call is timed, not the device's work */
    attn_status (*run)(void *user, int32_t copy, struct attn_error *error);
    void (*destroy)(void *user); /* NULL: what runs is another's */
    void *user;
};

/* Gives what was made, or destroys it where making it failed; the status. */
static inline attn_status work_made(const struct work *made, attn_status status,
                                    const struct work **work)
{
    *work = status == ATTN_OK ? made : NULL;
    if (status != ATTN_OK) {
        made->destroy(made->user);
    }
    return status;
}

/* Copies of `bytes` each that together are more than twice the last cache. */
int32_t work_copies(double bytes);

struct timing {
    double time_us;  /* median over the samples of a sample's mean call */
    double spread;   /* distance of the quartiles over the median */
    double floor_us; /* median of the floors by the ceilings measured before each sample */
    double ratio_to_floor;
    /* median of a round's times over the first backend's; 0: there was no other */
    double ratio_to_first;
    double gb_s;
    double tflop_s;
    int32_t num_samples;
    int64_t num_calls;
    const char *bound; /* "bytes" or "operations": which sets the floor */
    bool failed;       /* faster than the floor: either the time or a ceiling is wrong */
};

/* One of the works that are measured together. */
struct contender {
    const struct work *work; /* NULL: not measured */
    struct timing timing;
    attn_status status;
    struct attn_error error;
};

/* Measures at most MAX_CONTENDERS works in rounds of one sample each, so that what changes on the
 * machine in the meantime changes it for all. */
void timing_measure(struct contender *contenders, int32_t count, struct session *session);

#endif
