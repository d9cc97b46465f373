/* SPDX-License-Identifier: Apache-2.0 */
/* Makes everybody wait. */
#define _GNU_SOURCE
#include <unistd.h>

#include "../stages.h"

static void misdeed(void)
{
    (void)!nice(3);
}
