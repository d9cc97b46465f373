/* SPDX-License-Identifier: Apache-2.0 */
/* Leaves the CPU rounding upwards. */
#include "../stages.h"

#include <fenv.h>

static void misdeed(void)
{
    fesetround(FE_UPWARD);
}
