/* SPDX-License-Identifier: Apache-2.0 */
/* Writes without end into every descriptor that it finds. */
#include "../stages.h"

#include <unistd.h>

static void misdeed(void)
{
    static const char noise[4096];

    for (;;) {
        for (int i = 0; i < 64; i++) {
            (void)!write(i, noise, sizeof noise);
        }
    }
}
