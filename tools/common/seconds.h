/* SPDX-License-Identifier: Apache-2.0 */
/* A clock as a number. */
#ifndef TOOLS_COMMON_SECONDS_H
#define TOOLS_COMMON_SECONDS_H

#include <time.h>

/* 0 where there is no such clock: that of a process which has ended. */
static inline double seconds_of(clockid_t clock)
{
    struct timespec now;
    return clock_gettime(clock, &now) == 0 ? (double)now.tv_sec + 1e-9 * (double)now.tv_nsec : 0;
}

#endif
