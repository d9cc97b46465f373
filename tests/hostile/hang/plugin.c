/* SPDX-License-Identifier: Apache-2.0 */
/* Never comes back. */
#include "../stages.h"

#include <unistd.h>

static void misdeed(void)
{
    for (;;) {
        pause();
    }
}
