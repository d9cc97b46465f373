/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/crash.h"

#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HANDLER_STACK (64 * 1024)

static const struct {
    int number;
    const char *name;
} signals[] = {{SIGSEGV, "SIGSEGV"},
               {SIGBUS, "SIGBUS"},
               {SIGFPE, "SIGFPE"},
               {SIGILL, "SIGILL"},
               {SIGABRT, "SIGABRT"}};

static const char *volatile current;
static char command[1024]; /* that repeats cases, but for their name */

static void put(const char *text)
{
    if (write(STDERR_FILENO, text, strlen(text)) < 0) {
        _exit(EXIT_FAILURE);
    }
}

static const char *name_of(int number)
{
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        if (signals[i].number == number) {
            return signals[i].name;
        }
    }
    return "a signal";
}

/* Only what is safe in a handler. */
static void on_crash(int number)
{
    put("attn-check: ");
    put(current != NULL ? current : "between cases");
    put(": crashed with ");
    put(name_of(number));
    if (current != NULL) {
        put("\n  ");
        put(command);
        put(current);
        put("'");
    }
    put("\n");
    _exit(EXIT_FAILURE);
}

void crash_watch(const char *target, uint64_t seed)
{
    static uint64_t stack[HANDLER_STACK / sizeof(uint64_t)]; /* the case may have used up its own */
    const stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_handler = on_crash, .sa_flags = SA_ONSTACK | SA_RESETHAND};
    snprintf(command, sizeof command, "gdb --args attn-check %s --full --seed %llu --filter '",
             target, (unsigned long long)seed);
    sigaltstack(&other, NULL);
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        sigaction(signals[i].number, &action, NULL);
    }
}

void crash_case(const char *name)
{
    current = name;
}
