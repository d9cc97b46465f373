/* SPDX-License-Identifier: Apache-2.0 */
/* Software prefetch of the next rows, a few lines at a time: the core drops a prefetch while all
 * its line buffers (some 28 on Zen 5) are busy.
 *
 * Two paces. Where memory is the limit, prefetch_step: single lines, at any place of a row; its
 * dozen instructions a line are free there, but bursts are not (bf16 decode, Zen 5: 5 % slower).
 * Where arithmetic is the limit, prefetch_burst: the lines of a step at once, a tenth of the
 * instructions (fp8 decode: 15 % faster, MLA: 12 %). */
#ifndef CPU_SIMD_PREFETCH_H
#define CPU_SIMD_PREFETCH_H

#include <stdbool.h>

#include "cpu_simd/kernels.h"

/* Where lines go that are asked for singly: 3 the nearest cache, 2 the second. */
#ifndef PREFETCH_HINT
#define PREFETCH_HINT 3
#endif

#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif

struct prefetch {
    const struct decode_args *args;
    int32_t steps;
    int32_t total;  /* lines */
    int32_t credit; /* a line is due for each `steps` of it */
    int32_t row;
    int32_t line;
};

/* `steps` calls of prefetch_step follow. */
INLINE struct prefetch prefetch_begin(const struct decode_args *args, int32_t steps)
{
    return (struct prefetch){
        .args = args, .steps = steps, .total = args->next_keys * args->next_lines};
}

INLINE void prefetch_step(struct prefetch *prefetch)
{
    const struct decode_args *args = prefetch->args;
    for (prefetch->credit += prefetch->total; prefetch->credit >= prefetch->steps;
         prefetch->credit -= prefetch->steps) {
        const char *row = args->next_rows[prefetch->row] + args->next_offset;
        __builtin_prefetch(row + 64 * prefetch->line, 0, PREFETCH_HINT);
        if (++prefetch->line == args->next_lines) {
            prefetch->line = 0;
            prefetch->row++;
        }
    }
}

struct burst {
    const char *at; /* NULL: nothing is left */
    const char *row_end;
    const char *const *row;
    const char *const *last;
    int64_t offset;
    int64_t row_bytes;
    int32_t share; /* lines of one step, all of one row */
};

INLINE void burst_row(struct burst *burst)
{
    burst->at = *burst->row + burst->offset;
    burst->row_end = burst->at + burst->row_bytes;
}

/* `steps` calls of prefetch_burst follow. */
INLINE struct burst burst_begin(const struct decode_args *args, int32_t steps)
{
    struct burst burst = {.row = args->next_rows,
                          .offset = args->next_offset,
                          .row_bytes = 64 * (int64_t)args->next_lines};
    if (args->next_keys > 0) {
        int32_t steps_of_row = steps > args->next_keys ? steps / args->next_keys : 1;
        burst.last = args->next_rows + args->next_keys - 1;
        burst.share = (args->next_lines + steps_of_row - 1) / steps_of_row;
        burst_row(&burst);
    }
    return burst;
}

INLINE void prefetch_burst(struct burst *burst)
{
    if (burst->at == NULL) {
        return;
    }
    if (burst->share == 4) { /* rows of 128 bf16, a key a step */
        __builtin_prefetch(burst->at, 0, 3);
        __builtin_prefetch(burst->at + 64, 0, 3);
        __builtin_prefetch(burst->at + 128, 0, 3);
        __builtin_prefetch(burst->at + 192, 0, 3);
    } else {
        for (int32_t i = 0; i < burst->share; i++) {
            __builtin_prefetch(burst->at + 64 * i, 0, 3);
        }
    }
    burst->at += 64 * burst->share;
    if (burst->at < burst->row_end) {
        return;
    }
    if (burst->row == burst->last) {
        burst->at = NULL;
        return;
    }
    burst->row++;
    burst_row(burst);
}

#endif
