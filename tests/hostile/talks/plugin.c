/* SPDX-License-Identifier: Apache-2.0 */
/* Greets on standard output, where an engine's own document may stand. */
#include <stdio.h>

#include "../stages.h"

static void misdeed(void)
{
    puts("hello");
}
