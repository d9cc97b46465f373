/* SPDX-License-Identifier: Apache-2.0 */
/* Lets a C++ exception out. */
#include "../stages.h"

void throw_something(void);

static void misdeed(void)
{
    throw_something();
}
