/* SPDX-License-Identifier: Apache-2.0 */
/* Leaves a process in a session of its own, which no signal to its group reaches. */
#define _GNU_SOURCE
#include <sys/wait.h>
#include <unistd.h>

#include "../stages.h"

static void misdeed(void)
{
    const pid_t pid = fork();
    if (pid == 0) {
        (void)setsid();
        if (fork() == 0) {
            for (;;) {
                pause();
            }
        }
        _exit(0);
    }
    (void)waitpid(pid, NULL, 0);
}
