/* SPDX-License-Identifier: Apache-2.0 */
/* Sends a signal to its own process. */
#include "../stages.h"

#include <signal.h>

static void misdeed(void)
{
    raise(SIGTERM);
}
