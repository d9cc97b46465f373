/* SPDX-License-Identifier: Apache-2.0 */
/* What a plugin may not change in the process that loads it. */
#ifndef TOOLS_COMMON_CONDUCT_H
#define TOOLS_COMMON_CONDUCT_H

#include <fenv.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#define CONDUCT_SIGNALS 65

struct conduct {
    struct sigaction actions[CONDUCT_SIGNALS];
    sigset_t blocked;
    uint64_t locale; /* hashes */
    uint64_t environment;
    uint64_t limits; /* limits of resources */
    uint64_t timers;
    cpu_set_t processors;
    int niceness;
    struct stat streams[3]; /* what 0, 1 and 2 lead to */
    struct stat folder;     /* the working directory */
    struct stat root;
    mode_t mask;
    int rounding;
    uint32_t float_control; /* flush to zero and trapped exceptions, where the CPU has them */
    stack_t signal_stack;   /* the calling thread's */
    int threads;            /* threads of the process; -1: they are not judged */
    int descriptor;         /* one that has to stay as it is; -1: none */
    int output; /* what conduct_catch_output gave; -1: what is written there is not judged */
};

/* The state now. `threads`: whether their number is judged. */
void conduct_read(struct conduct *conduct, int descriptor, int output, bool threads);

/* Redirects standard output into a small pipe and returns the pipe's other end; -1 on failure.
 * Output that does not fit into the pipe is lost. */
int conduct_catch_output(void);

/* Ends what the plugin left running and counts it: children, and theirs. For once they are ours,
 * see PR_SET_CHILD_SUBREAPER. */
int conduct_end_children(void);

/* NULL, or what the plugin did: "changed the handler of signal 11". `text` is storage for it. */
const char *conduct_difference(const struct conduct *before, char *text, size_t size);
/* Puts back what can be put back of the calling thread and the process: handlers, blocked signals,
 * the signal stack, mask, rounding and the floating-point control word. */
void conduct_restore(const struct conduct *before);

#endif
