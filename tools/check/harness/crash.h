/* SPDX-License-Identifier: Apache-2.0 */
/* What is said of a fatal signal: its name, the address, the buffer next to it. */
#ifndef CHECK_CRASH_H
#define CHECK_CRASH_H

#include <stdbool.h>
#include <stdint.h>

/* From now on a fatal signal is reported and ends the process with status 1: on stderr with the
 * case and the command that repeats it under a debugger (`target` and `seed` of this run), or,
 * after crash_report_to, by a function that is safe in a
 * handler. */
void crash_watch(const char *target, uint64_t seed);
void crash_report_to(void (*report)(const char *text));
/* What runs, a case or not; borrowed until the next call. NULL: nothing. */
void crash_case(const char *name, bool is_case);

#endif
