/* SPDX-License-Identifier: Apache-2.0 */
/* The text about a fatal signal. */
#include "harness/worker.h"
#include "harness/image.h"

#include <signal.h>
#include <stdbool.h>
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
static volatile bool current_is_case;
static void (*report_to)(const char *text);
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

static void append(char *text, size_t size, const char *more)
{
    strncat(text, more, size - strlen(text) - 1);
}

/* Calls only functions that are safe in a signal handler. */
static void on_crash(int number, siginfo_t *info, void *context)
{
    char text[BUFFER_TEXT + 64] = "crashed with ", place[BUFFER_TEXT];
    append(text, sizeof text, name_of(number));
    if (number == SIGSEGV || number == SIGBUS) {
        append(text, sizeof text, " at ");
        append(text, sizeof text, buffer_at_address(info->si_addr, place));
    }
    if (report_to != NULL) {
        report_to(text);
        _exit(EXIT_FAILURE);
    }
    put("attn-check: ");
    put(current != NULL ? current : "between cases");
    put(": ");
    put(text);
    if (current != NULL && current_is_case) {
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
    struct sigaction action = {.sa_sigaction = on_crash,
                               .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESETHAND};
    snprintf(command, sizeof command, "gdb --args attn-check %s --full --seed %llu --filter '",
             target, (unsigned long long)seed);
    sigaltstack(&other, NULL);
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        sigaction(signals[i].number, &action, NULL);
    }
}

void crash_report_to(void (*report)(const char *text))
{
    report_to = report;
}

void crash_case(const char *name, bool is_case)
{
    current_is_case = is_case;
    current = name;
}
