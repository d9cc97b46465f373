/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks a signal and leaves it so. */
#define _GNU_SOURCE
#include <signal.h>

#include "../stages.h"

static void misdeed(void)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
}
