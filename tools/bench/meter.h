/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels behind the ceilings, by type of device. */
#ifndef BENCH_METER_H
#define BENCH_METER_H

#include "ceilings.h"

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
    void (*destroy)(void *meter); /* accepts NULL */
    /* Passes are timed by what their threads take of the processor; NULL: cannot be. */
    void (*count_cpu_time)(void *meter);
    /* One pass: bytes or operations per second; 0 if it failed. */
    double (*run)(void *meter, const struct meter_kernel *kernel);
};

extern const struct meter_type meter_cpu;
extern const struct meter_type meter_cuda;
extern const struct meter_type meter_hip;

#endif
