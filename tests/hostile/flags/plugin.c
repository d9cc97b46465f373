/* SPDX-License-Identifier: Apache-2.0 */
/* Keeps the handler of SIGCHLD and changes what comes with it. */
#define _GNU_SOURCE
#include <signal.h>

#include "../stages.h"

static void misdeed(void)
{
    struct sigaction action;
    (void)sigaction(SIGCHLD, NULL, &action);
    action.sa_flags |= SA_NOCLDWAIT;
    (void)sigaction(SIGCHLD, &action, NULL);
}
