/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of the CPU's ceilings: baseline ones, and those of an instruction set that a CPU may
 * lack. */
#ifndef BENCH_METER_CPU_H
#define BENCH_METER_CPU_H

#include <stddef.h>
#include <stdint.h>

#include "ceilings.h"

/* A thread's share: `bytes` of memory at `from` (and `to`), or `rounds` of arithmetic. Gives what
 * was read or computed, so that nothing is left out by the compiler. */
struct share {
    const uint8_t *from;
    uint8_t *to;
    size_t bytes;   /* a multiple of 4096 */
    int64_t rounds; /* arithmetic */
};

struct cpu_kernel {
    const char *name;
    enum ceiling ceiling;
    uint64_t (*work)(const struct share *share);
    double operations; /* operations of one round; 0: memory */
};

/* At most METER_MAX_KERNELS; those that this CPU can run. */
int32_t cpu_kernels_x86(struct cpu_kernel *kernels);

#endif
