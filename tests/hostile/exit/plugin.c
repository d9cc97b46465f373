/* SPDX-License-Identifier: Apache-2.0 */
/* Ends the process in good order. */
#include "../stages.h"

#include <stdlib.h>

static void misdeed(void)
{
    exit(7);
}
