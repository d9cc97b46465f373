/* SPDX-License-Identifier: Apache-2.0 */
/* Takes all the memory that it can get, and writes into what it did not get. */
#include "../stages.h"

#include <stdlib.h>

static void misdeed(void)
{
    for (;;) {
        volatile char *memory = malloc((size_t)16 << 20);

        memory[0] = 1;
    }
}
