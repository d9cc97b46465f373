/* SPDX-License-Identifier: Apache-2.0 */
/* The time of a work beside the floor that the ceilings set. */
#ifndef BENCH_TIMING_H
#define BENCH_TIMING_H

#include "session.h"
#include "work.h"

struct timing {
    double time_us;  /* median over the samples of a sample's mean call */
    double spread;   /* distance of the quartiles over the median */
    double floor_us; /* median of the floors by the ceilings measured before each sample */
    double ratio_to_floor;
    double gb_s;
    double tflop_s;
    int32_t num_samples;
    int64_t num_calls;
    const char *bound; /* "bytes" or "operations": which sets the floor */
    bool failed;       /* faster than the floor: either the time or a ceiling is wrong */
};

double now_seconds(void);
/* Sorts; 0 of no values. `part` 0.5: the median. */
double quantile(double *values, int32_t count, double part);
attn_status timing_measure(struct timing *timing, struct session *session, const struct work *work,
                           struct attn_error *error);

#endif
