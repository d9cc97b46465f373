/* SPDX-License-Identifier: Apache-2.0 */
/* Leaves a thread that runs on. */
#define _GNU_SOURCE
#include <pthread.h>
#include <unistd.h>

#include "../stages.h"

static void *run_on(void *nothing)
{
    for (;;) {
        pause();
    }
    return nothing;
}

static void misdeed(void)
{
    pthread_t thread;
    (void)pthread_create(&thread, NULL, run_on, NULL);
}
