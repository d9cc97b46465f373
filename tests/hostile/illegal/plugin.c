/* SPDX-License-Identifier: Apache-2.0 */
/* Executes what this CPU does not have, as a library built for a newer one would. */
#include "../stages.h"

static void misdeed(void)
{
#if defined(__x86_64__)
    __asm__ volatile("ud2");
#else
    __builtin_trap();
#endif
}
