/* SPDX-License-Identifier: Apache-2.0 */
/* Lowers how many files everybody may open. */
#define _GNU_SOURCE
#include <sys/resource.h>

#include "../stages.h"

static void misdeed(void)
{
    struct rlimit limit;
    (void)getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur--;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
}
