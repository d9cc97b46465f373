/* SPDX-License-Identifier: Apache-2.0 */
/* Sends the standard error of everybody to a file of its own. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <unistd.h>

#include "../stages.h"

static void misdeed(void)
{
    const int own = open("/dev/zero", O_WRONLY);
    (void)dup2(own, STDERR_FILENO);
    close(own);
}
