/* SPDX-License-Identifier: Apache-2.0 */
/* A backend that crashes takes the suite with it; but not without the name of the case. */
#ifndef CHECK_CRASH_H
#define CHECK_CRASH_H

#include <stdint.h>

/* From now on a fatal signal names the case on stderr, with the command that repeats it under a
 * debugger (`target` and `seed` of this run), and ends the process with status 1. */
void crash_watch(const char *target, uint64_t seed);
/* The case that runs; borrowed until the next call. NULL: none. */
void crash_case(const char *name);

#endif
