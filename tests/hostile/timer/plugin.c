/* SPDX-License-Identifier: Apache-2.0 */
/* Arms a timer and leaves it running. */
#define _GNU_SOURCE
#include <sys/time.h>

#include "../stages.h"

static void misdeed(void)
{
    const struct itimerval every = {{500, 0}, {500, 0}};
    (void)setitimer(ITIMER_PROF, &every, NULL);
}
