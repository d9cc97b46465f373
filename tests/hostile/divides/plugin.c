/* SPDX-License-Identifier: Apache-2.0 */
/* Asks for a floating-point exception's signal. */
#include "../stages.h"

#include <signal.h>

static void misdeed(void)
{
    raise(SIGFPE);
}
