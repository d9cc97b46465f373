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

#define METER_MAX_KERNELS 24
/* Larger than any cache; half of it is a copy's source. */
#define METER_BYTES (INT64_C(1) << 30)

struct meter_kernel {
    const char *name; /* static */
    enum ceiling ceiling;
    int32_t code; /* the meter's own */
};

struct meter_type {
    int32_t device_type;
    /* Fills `kernels` with what this machine can run; num_units as for ceilings_create. */
    attn_status (*create)(void **meter, struct meter_kernel *kernels, int32_t *num_kernels,
                          const struct device *device, int32_t num_units, struct attn_error *error);
    void (*destroy)(void *meter);
    /* Passes are timed by what their threads take of the processor; NULL: cannot be. */
    void (*count_cpu_time)(void *meter);
    /* One pass: bytes or operations per second; 0 if it failed. */
    double (*run)(void *meter, const struct meter_kernel *kernel);
};

struct ceilings {
    const struct meter_type *type;
    void *meter;
    struct meter_kernel kernels[METER_MAX_KERNELS];
    int32_t num_kernels;
    const struct meter_kernel *kernel[CEILING_COUNT]; /* that stands for it; NULL: none */
    double best[CEILING_COUNT];                       /* the best rate seen so far */
};

/* num_units: threads of a CPU, else multiprocessors. passes: how often each kernel runs before the
 * best is chosen. cpu_time: a pass takes what its threads take of the processor; of CPUs. */
attn_status ceilings_create(struct ceilings **ceilings, const struct device *device,
                            int32_t num_units, int32_t passes, bool cpu_time,
                            struct attn_error *error);
void ceilings_destroy(struct ceilings *ceilings);
/* One pass of the kernel that was best at creation; rate in units of 1/s. 0: it failed. */
double ceilings_measure(struct ceilings *ceilings, enum ceiling ceiling);
extern const struct meter_type meter_cpu, meter_cuda, meter_hip;

#endif
