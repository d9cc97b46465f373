/* SPDX-License-Identifier: Apache-2.0 */
/* Ties the process to one processor. */
#define _GNU_SOURCE
#include <sched.h>

#include "../stages.h"

static void misdeed(void)
{
    cpu_set_t all, one;
    (void)sched_getaffinity(0, sizeof all, &all);
    for (int i = 0; i < CPU_SETSIZE; i++) {
        if (CPU_ISSET(i, &all)) {
            CPU_ZERO(&one);
            CPU_SET(i, &one);
        }
    }
    (void)sched_setaffinity(0, sizeof one, &one);
}
