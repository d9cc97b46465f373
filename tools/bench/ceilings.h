/* SPDX-License-Identifier: Apache-2.0 */
/* What the machine could do: the rates that a kernel's time is held against, measured in this
 * process, before each sample of the kernel, by the same number of threads. A ceiling is the best
 * of several kernels. */
#ifndef BENCH_CEILINGS_H
#define BENCH_CEILINGS_H

#include <attn/status.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/device.h"

enum ceiling {
    CEILING_READ, /* bytes/s: a gibibyte, once */
    CEILING_COPY, /* bytes/s read and written: half a gibibyte into the other half */
    CEILING_F32,  /* operations/s, a multiply and an add being two, in registers */
    CEILING_BF16, /* the same by the best bfloat16 product that the machine has */
    CEILING_COUNT
};

struct ceilings;

/* num_units: threads of a CPU, else multiprocessors. passes: how often each kernel runs before the
 * best is chosen. cpu_time: a pass takes what its threads take of the processor; of CPUs. */
attn_status ceilings_create(struct ceilings **ceilings, const struct device *device,
                            int32_t num_units, int32_t passes, bool cpu_time,
                            struct attn_error *error);
void ceilings_destroy(struct ceilings *ceilings);
/* One pass of the kernel that was best at creation; rate in units of 1/s. 0: it failed. */
double ceilings_measure(struct ceilings *ceilings, enum ceiling ceiling);
/* The best rate seen so far, and the kernel it came from. */
double ceilings_best(const struct ceilings *ceilings, enum ceiling ceiling);
const char *ceilings_kernel(const struct ceilings *ceilings, enum ceiling ceiling);

#endif
