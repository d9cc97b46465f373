/* SPDX-License-Identifier: Apache-2.0 */
/* Software prefetch of the rows that come next, one line now and then: more lines at a time than
 * the core can have under way would only stall the loads behind them. */
#ifndef CPU_SIMD_PREFETCH_H
#define CPU_SIMD_PREFETCH_H

#include "../engine.h"

#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif

struct prefetch {
    const struct direct_args *args;
    int32_t steps;
    int32_t total;  /* lines */
    int32_t credit; /* a line is due for each `steps` of it */
    int32_t row;
    int32_t line;
};

INLINE struct prefetch prefetch_begin(const struct direct_args *args, int32_t steps)
{
    return (struct prefetch){
        .args = args, .steps = steps, .total = args->next_keys * args->next_lines};
}

INLINE void prefetch_step(struct prefetch *prefetch)
{
    const struct direct_args *args = prefetch->args;
    for (prefetch->credit += prefetch->total; prefetch->credit >= prefetch->steps;
         prefetch->credit -= prefetch->steps) {
        const char *row = args->next_rows[prefetch->row] + args->next_offset;
        __builtin_prefetch(row + 64 * prefetch->line, 0, 3);
        if (++prefetch->line == args->next_lines) {
            prefetch->line = 0;
            prefetch->row++;
        }
    }
}

#endif
