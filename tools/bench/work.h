/* SPDX-License-Identifier: Apache-2.0 */
/* One thing to time: a call over one of several copies of its data, and what it moves and computes.
 */
#ifndef BENCH_WORK_H
#define BENCH_WORK_H

#include <attn/status.h>
#include <stdbool.h>

#include "ceilings.h"

struct work {
    double bytes_read; /* one call's; no byte counts twice */
    double bytes_written;
    double operations; /* a multiply and an add are two */
    enum ceiling arithmetic;
    bool narrow;        /* operands of 8 bits, which a GPU multiplies at twice the rate */
    int32_t num_copies; /* one after the other, they push each other out of the caches */
    bool near;          /* one copy, which the caches may hold: its bytes make no floor */
    bool host_only; /* one copy; what the host takes for a call is timed, not the device's work */
    attn_status (*run)(void *user, int32_t copy, struct attn_error *error);
    void *user;
};

/* Copies of `bytes` each that together are more than twice the last cache. */
int32_t work_copies(double bytes);

#endif
