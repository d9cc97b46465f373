/* SPDX-License-Identifier: Apache-2.0 */
/* Lets everybody write what the process will create. */
#include "../stages.h"

#include <sys/stat.h>

static void misdeed(void)
{
    umask(0);
}
