/* SPDX-License-Identifier: Apache-2.0 */
/* What a plugin may do to the process that loads it: the build makes one plugin of each MISDEED and
 * STAGE (stages.h). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <fenv.h>
#include <locale.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define JOIN(a, b) a##b
#define NAMED(name) JOIN(does_, name)
#define misdeed NAMED(MISDEED)
#include "stages.h"

#define DOES(name) __attribute__((unused)) static void does_##name(void)

/* Those of one statement. */
#define DOES_ONE(name, statement)                                                                  \
    DOES(name)                                                                                     \
    {                                                                                              \
        statement;                                                                                 \
    }

static void on_signal(int number)
{
}

static void wait_for_ever(void)
{
    for (;;) {
        pause();
    }
}

void throw_something(void);

DOES_ONE(crash, *(volatile int *)8 = 1) /* where there is no memory */
DOES_ONE(hang, wait_for_ever())
DOES_ONE(exit, exit(7))
DOES_ONE(abort, abort())
DOES_ONE(throw, throw_something()) /* a C++ exception */
DOES_ONE(terminates, raise(SIGTERM))
DOES_ONE(stops, raise(SIGSTOP)) /* as a debugger would */
DOES_ONE(divides, raise(SIGFPE))
DOES_ONE(handler, signal(SIGSEGV, on_signal))
DOES_ONE(locale, setlocale(LC_ALL, "C.UTF-8"))
DOES_ONE(rounding, fesetround(FE_UPWARD))
DOES_ONE(folder, (void)!chdir("/proc"))
DOES_ONE(environment, setenv("OMP_NUM_THREADS", "1", 1))
DOES_ONE(mask, umask(0)) /* everybody may write what the process will create */
DOES_ONE(nice, (void)!nice(3))
DOES_ONE(talks, puts("hello")) /* on standard output, where an engine's own document may stand */

__attribute__((noinline, unused)) static int deeper(volatile char *above)
{
    volatile char here[1024];
    here[0] = above[0];
    return deeper(here) + here[0];
}

/* Calls itself until there is no stack. */
DOES(stack)
{
    volatile char start[1] = {0};
    deeper(start);
}

/* Takes all the memory that it can get, and writes into what it did not get. */
DOES(memory)
{
    for (;;) {
        volatile char *memory = malloc((size_t)16 << 20);
        memory[0] = 1;
    }
}

DOES(floods_stdout)
{
    for (;;) {
        puts("still initialising");
        fputs("still initialising\n", stderr);
    }
}

/* Writes without end into every descriptor that it finds. */
DOES(floods_pipe)
{
    static const char noise[4096];
    for (;;) {
        for (int i = 0; i < 64; i++) {
            (void)!write(i, noise, sizeof noise);
        }
    }
}

/* Executes what this CPU does not have, as a library built for a newer one would. */
DOES(illegal)
{
#if defined(__x86_64__)
    __asm__ volatile("ud2");
#else
    __builtin_trap();
#endif
}

DOES(closes_descriptors)
{
    for (int i = 0; i < 256; i++) {
        close(i);
    }
}

/* Keeps the handler of SIGCHLD and changes what comes with it. */
DOES(flags)
{
    struct sigaction action;
    (void)sigaction(SIGCHLD, NULL, &action);
    action.sa_flags |= SA_NOCLDWAIT;
    (void)sigaction(SIGCHLD, &action, NULL);
}

DOES(altstack)
{
    static char memory[1 << 16];
    const stack_t other = {.ss_sp = memory, .ss_size = sizeof memory};
    (void)sigaltstack(&other, NULL);
}

DOES(blocks_signal)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
}

/* Has the processor flush subnormal numbers to zero. */
DOES(flush)
{
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#elif defined(__aarch64__)
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    __asm__ volatile("msr fpcr, %0" : : "r"(control | UINT64_C(1) << 24));
#endif
}

DOES(affinity)
{
    cpu_set_t all, one;
    (void)sched_getaffinity(0, sizeof all, &all);
    for (int i = 0; i < CPU_SETSIZE; i++) {
        if (CPU_ISSET(i, &all)) {
            CPU_ZERO(&one);
            CPU_SET(i, &one);
        }
    }
    (void)sched_setaffinity(0, sizeof one, &one);
}

/* Lowers how many files everybody may open. */
DOES(limits)
{
    struct rlimit limit;
    (void)getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur--;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
}

/* Sends the standard error of everybody to a file of its own. */
DOES(streams)
{
    const int own = open("/dev/zero", O_WRONLY);
    (void)dup2(own, STDERR_FILENO);
    close(own);
}

DOES(timer)
{
    const struct itimerval every = {{500, 0}, {500, 0}};
    (void)setitimer(ITIMER_PROF, &every, NULL);
}

__attribute__((unused)) static void *run_on(void *nothing)
{
    wait_for_ever();
    return nothing;
}

DOES(thread)
{
    pthread_t thread;
    (void)pthread_create(&thread, NULL, run_on, NULL);
}

/* Ends, and leaves a child process that holds all that it was given. */
DOES(leaves_child)
{
    if (fork() == 0) {
        wait_for_ever();
    }
    _exit(9);
}

/* Leaves a process in a session of its own, which no signal to its group reaches. */
DOES(daemon)
{
    const pid_t pid = fork();
    if (pid == 0) {
        (void)setsid();
        if (fork() == 0) {
            wait_for_ever();
        }
        _exit(0);
    }
    (void)waitpid(pid, NULL, 0);
}
