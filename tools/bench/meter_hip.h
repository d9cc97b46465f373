/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernels of AMD's ceilings and those who launch them agree on. */
#ifndef BENCH_METER_HIP_H
#define BENCH_METER_HIP_H

#include <stdint.h>

#define METER_THREADS 256 /* threads of a group */
#define METER_FMA 64      /* operations of a thread's round: 32 products and sums */
/* a thread's: 8 products of a wave of 64, or 4 of 32 */
#define METER_MATRIX (2 * 16 * 16 * 16 / 8)

struct meter_hip_args {
    const void *from;
    void *to;
    uint64_t bytes;
    int32_t rounds, groups;
};

#endif
