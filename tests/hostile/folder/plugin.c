/* SPDX-License-Identifier: Apache-2.0 */
/* Changes the working directory. */
#include "../stages.h"

#include <unistd.h>

static void misdeed(void)
{
    (void)!chdir("/proc");
}
