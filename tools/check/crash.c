/* SPDX-License-Identifier: Apache-2.0 */
#include "crash.h"

#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HANDLER_STACK (64 * 1024)

static const char *volatile current;

static void put(const char *text)
{
    if (write(STDERR_FILENO, text, strlen(text)) < 0) {
        _exit(EXIT_FAILURE);
    }
}

/* Only what is safe in a handler. */
static void on_crash(int number)
{
    const char digits[] = {(char)('0' + number / 10), (char)('0' + number % 10), '\n', '\0'};
    put("attn-check: ");
    put(current != NULL ? current : "between cases");
    put(": crashed with signal ");
    put(digits);
    _exit(EXIT_FAILURE);
}

void crash_watch(void)
{
    static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    static uint64_t stack[HANDLER_STACK / sizeof(uint64_t)]; /* the case may have used up its own */
    const stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_handler = on_crash, .sa_flags = SA_ONSTACK | SA_RESETHAND};
    sigaltstack(&other, NULL);
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        sigaction(signals[i], &action, NULL);
    }
}

void crash_case(const char *name)
{
    current = name;
}
