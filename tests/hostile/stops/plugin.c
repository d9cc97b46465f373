/* SPDX-License-Identifier: Apache-2.0 */
/* Stops its process, as a debugger would. */
#include "../stages.h"

#include <signal.h>

static void misdeed(void)
{
    raise(SIGSTOP);
}
