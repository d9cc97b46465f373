/* SPDX-License-Identifier: Apache-2.0 */
/* Talks without end. */
#include "../stages.h"

#include <stdio.h>

static void misdeed(void)
{
    for (;;) {
        puts("still initialising");
        fputs("still initialising\n", stderr);
    }
}
