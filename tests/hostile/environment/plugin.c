/* SPDX-License-Identifier: Apache-2.0 */
/* Sets a variable for everybody. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "../stages.h"

static void misdeed(void)
{
    setenv("OMP_NUM_THREADS", "1", 1);
}
