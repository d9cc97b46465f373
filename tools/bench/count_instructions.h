/* SPDX-License-Identifier: Apache-2.0 */
/* Instructions of this thread: the processor's counter, or valgrind's callgrind where there is
 * none. */
#ifndef BENCH_COUNT_INSTRUCTIONS_H
#define BENCH_COUNT_INSTRUCTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* -1: the system gives no counter. */
int counter_open(void);
void counter_close(int counter);
void counter_start(int counter);
int64_t counter_stop(int counter);

/* Runs this tool again under callgrind, which counts inside `function` alone. -1, and why, where
 * that cannot be. */
int64_t callgrind_count(char *const *arguments, const char *function, char *why, size_t size);
/* Runs this tool again and gives the number that it prints. -1: it failed. */
double child_number(char *const *arguments);

#endif
