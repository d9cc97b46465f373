/* SPDX-License-Identifier: Apache-2.0 */
/* Calls itself until there is no stack. */
#include "../stages.h"

static volatile int depth;

__attribute__((noinline)) static int deeper(volatile char *above)
{
    volatile char here[1024];

    here[0] = above[0];
    depth++;
    return deeper(here) + here[0];
}

static void misdeed(void)
{
    volatile char start[1] = {0};

    deeper(start);
}
