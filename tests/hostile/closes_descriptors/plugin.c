/* SPDX-License-Identifier: Apache-2.0 */
/* Closes what others have opened. */
#include "../stages.h"

#include <unistd.h>

static void misdeed(void)
{
    for (int i = 0; i < 256; i++) {
        close(i);
    }
}
