/* SPDX-License-Identifier: Apache-2.0 */
/* What a plugin may not change in the process that loads it. */
#ifndef SCAN_CONDUCT_H
#define SCAN_CONDUCT_H

#include <fenv.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#define CONDUCT_SIGNALS 65

struct conduct {
    struct sigaction actions[CONDUCT_SIGNALS];
    sigset_t blocked;
    uint64_t locale; /* hashes */
    uint64_t environment;
    uint64_t limits; /* of resources */
    uint64_t timers;
    cpu_set_t processors;
    int niceness;
    struct stat streams[3]; /* what 0, 1 and 2 lead to */
    struct stat folder;     /* the working directory */
    struct stat root;
    mode_t mask;
    int rounding;
    uint32_t float_control; /* flush to zero and trapped exceptions, where the CPU has them */
    int descriptor;         /* one that has to stay as it is */
};

void conduct_read(struct conduct *conduct, int descriptor);

/* Ends what the plugin left running and counts it: children, and theirs. For once they are ours,
 * see PR_SET_CHILD_SUBREAPER. */
int conduct_end_children(void);

/* NULL, or what the plugin changed: "the handler of SIGSEGV". `text` is storage for it. */
const char *conduct_difference(const struct conduct *before, char *text, size_t size);

#endif
