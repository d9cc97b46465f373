/* SPDX-License-Identifier: Apache-2.0 */
#ifndef STEP_SPY_H
#define STEP_SPY_H

#include <stdint.h>

/* Calls of kernels; `fused`: attends that had to write. */
struct spy_counts {
    int32_t attends, fused, fused_prefills, writes, rope_writes, prepares;
    int32_t block_size;    /* of the last attend's cache, its layer's too */
    int32_t failing;       /* n > 0: the n-th attend from now writes out and fails */
    int32_t other_streams; /* calls on another stream than the one below */
    void *stream;
};

#endif
