/* SPDX-License-Identifier: Apache-2.0 */
/* Ends the process in anger. */
#include "../stages.h"

#include <stdlib.h>

static void misdeed(void)
{
    abort();
}
