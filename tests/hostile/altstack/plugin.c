/* SPDX-License-Identifier: Apache-2.0 */
/* Gives the thread another stack for signal handlers. */
#define _GNU_SOURCE
#include <signal.h>

#include "../stages.h"

static void misdeed(void)
{
    static char memory[1 << 16];
    const stack_t other = {.ss_sp = memory, .ss_size = sizeof memory};
    (void)sigaltstack(&other, NULL);
}
