/* SPDX-License-Identifier: Apache-2.0 */
/* Leaves a process behind that holds all that it was given, and ends. */
#include "../stages.h"

#include <unistd.h>

static void misdeed(void)
{
    if (fork() == 0) {
        for (;;) {
            pause();
        }
    }
    _exit(9);
}
