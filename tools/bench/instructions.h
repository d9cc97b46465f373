/* SPDX-License-Identifier: Apache-2.0 */
/* Instructions of calls: by the processor's counter, or by valgrind's callgrind where there is
 * none.
 */
#ifndef BENCH_INSTRUCTIONS_H
#define BENCH_INSTRUCTIONS_H

#include <stddef.h>

#include "work.h"

#define COUNTED_CALLS 1000

/* Runs COUNTED_CALLS calls of `work`. Not inlined: callgrind counts inside it by its name. */
attn_status instructions_run(const struct work *work);
/* Instructions of one call in this thread; -1: there is no counter. */
double instructions_count(const struct work *work);
/* The same by callgrind of `attn-bench arguments...`, which is to call instructions_run once. -1,
 * and why. */
double instructions_of_process(char *const *arguments, char *why, size_t size);

#endif
