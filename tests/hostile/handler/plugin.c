/* SPDX-License-Identifier: Apache-2.0 */
/* Installs a signal handler. */
#include "../stages.h"

#include <signal.h>

static void on_signal(int number)
{
}

static void misdeed(void)
{
    signal(SIGSEGV, on_signal);
}
