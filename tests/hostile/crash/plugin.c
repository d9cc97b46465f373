/* SPDX-License-Identifier: Apache-2.0 */
/* Writes to where there is no memory. */
#include "../stages.h"

static void misdeed(void)
{
    *(volatile int *)8 = 1;
}
