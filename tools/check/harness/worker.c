/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/worker.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/command.h"
#include "harness/image.h"

#define MAX_CRASHES 100 /* after so many nothing new is learned */
#define MAX_HANGS 5     /* the same, after many times the seconds of a case */
#define HANDLER_STACK (64 * 1024)
#define BUSY 50 /* a process that works has this part of a processor */

/* Two texts follow it. */
struct frame {
    int32_t kind, value;
    uint32_t sizes[2];
};

/* Writes, or reads, all of these bytes; false at the pipe's end. */
static bool move_bytes(int pipe, void *bytes, size_t size, bool writes)
{
    char *at = bytes;
    while (size > 0) {
        ssize_t done = writes ? write(pipe, at, size) : read(pipe, at, size);
        if (done <= 0 && !(done < 0 && errno == EINTR)) {
            return false;
        }
        at += done > 0 ? done : 0;
        size -= done > 0 ? (size_t)done : 0;
    }
    return true;
}

static void put_frame(int pipe, int32_t kind, int32_t value, const char *first, const char *second)
{
    struct frame frame = {kind, value, {(uint32_t)strlen(first), (uint32_t)strlen(second)}};
    if (!move_bytes(pipe, &frame, sizeof frame, true) ||
        !move_bytes(pipe, (void *)(uintptr_t)first, frame.sizes[0], true) ||
        !move_bytes(pipe, (void *)(uintptr_t)second, frame.sizes[1], true)) {
        _exit(EXIT_FAILURE); /* the reader has ended */
    }
}

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
static int crash_pipe = -1; /* in a worker */
static char command[1024];  /* that repeats cases, but for their name */

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
    if (crash_pipe >= 0) {
        put_frame(crash_pipe, OUTLET_CRASH, 0, text, "");
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

static void on_no_memory(const char *message)
{
    put_frame(crash_pipe, OUTLET_CRASH, 1, message, "");
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

void crash_case(const char *name, bool is_case)
{
    current_is_case = is_case;
    current = name;
}

static void take(struct report *report, int32_t kind, int32_t value, const char *first,
                 const char *second)
{
    if (kind == OUTLET_RESULT) {
        report_add(report, first, (enum trial_result)value, second);
    } else if (kind == OUTLET_TIME) {
        report_time(report, strtod(first, NULL));
    } else if (kind == OUTLET_DECLARED) {
        report_describe(report, first, second);
    } else if (kind == OUTLET_RECORD) {
        report_record(report, first);
    }
}

void outlet_put(const struct outlet *outlet, enum outlet_kind kind, int32_t value,
                const char *first, const char *second)
{
    if (kind == OUTLET_CASE || kind == OUTLET_STAGE) {
        crash_case(first, kind == OUTLET_CASE);
    }
    take(outlet->report, kind, value, first, second);
    if (outlet->pipe >= 0) {
        put_frame(outlet->pipe, kind, value, first, second);
    }
}

/* What is known of a worker while it runs and after. */
struct worker {
    struct report *report;
    int32_t begun; /* counted cases, those of earlier workers included */
    char *current; /* the case or stage that runs; NULL: between them */
    bool is_case;
    char *crash;        /* its own report of its crash; NULL: none */
    bool lacked_memory; /* it ended itself, and is no crash */
    bool hung;          /* it was ended at the case's deadline */
    double begun_at[2]; /* `current`: processor time and time of day, in seconds */
    clockid_t processor;
    int32_t value; /* value of its run; -1: it did not come to its end */
};

static void begin_clocks(struct worker *worker)
{
    worker->begun_at[0] = seconds_of(worker->processor);
    worker->begun_at[1] = seconds_of(CLOCK_MONOTONIC);
}

/* Whether what runs has had its seconds: of a processor, or of waiting for something that does not
 * come. */
static bool is_late(const struct worker *worker, int32_t seconds)
{
    const double worked = seconds_of(worker->processor) - worker->begun_at[0];
    const double waited = seconds_of(CLOCK_MONOTONIC) - worker->begun_at[1];
    return worker->current != NULL &&
           (worked > seconds || (waited > seconds && worked * BUSY < waited));
}

/* One frame; false at the pipe's end. */
static bool take_frame(struct worker *worker, int pipe)
{
    struct frame frame;
    char *texts[2] = {NULL, NULL};
    bool ok = move_bytes(pipe, &frame, sizeof frame, false);
    for (int32_t i = 0; i < 2 && ok; i++) {
        texts[i] = command_calloc(1, (size_t)frame.sizes[i] + 1);
        ok = move_bytes(pipe, texts[i], frame.sizes[i], false);
    }
    if (!ok) {
        frame.kind = OUTLET_KIND_COUNT;
    }
    take(worker->report, frame.kind, frame.value, texts[0], texts[1]);
    switch (frame.kind) {
    case OUTLET_CASE:
    case OUTLET_STAGE:
    case OUTLET_RESULT:
        free(worker->current);
        worker->is_case = frame.kind == OUTLET_CASE;
        worker->begun += worker->is_case;
        worker->current = frame.kind != OUTLET_RESULT ? texts[0] : NULL;
        texts[0] = frame.kind != OUTLET_RESULT ? NULL : texts[0];
        begin_clocks(worker);
        break;
    case OUTLET_CRASH:
        free(worker->crash);
        worker->crash = texts[0];
        worker->lacked_memory = frame.value != 0;
        texts[0] = NULL;
        break;
    case OUTLET_END:
        worker->value = frame.value;
        break;
    default:
        break;
    }
    free(texts[0]);
    free(texts[1]);
    return ok;
}

/* Describes how the worker ended if it did not exit by itself. */
static void say_end(const struct worker *worker, int32_t seconds, int status, char *text,
                    size_t size)
{
    if (worker->hung) {
        snprintf(text, size, "hangs: it had not returned after %d seconds (--case-seconds)",
                 seconds);
    } else if (worker->crash != NULL) {
        snprintf(text, size, "%s", worker->crash);
    } else if (WIFSIGNALED(status)) {
        snprintf(text, size, "the process was ended by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
    } else {
        snprintf(text, size, "the process was ended with exit status %d", WEXITSTATUS(status));
    }
}

/* A worker from its start to its end; false: it could not be started. */
static bool run_worker(struct worker *worker, worker_run *run, void *user, int32_t seconds,
                       int *status)
{
    int ends[2];
    if (pipe(ends) != 0) {
        return false;
    }
    fflush(NULL);
    pid_t process = fork();
    if (process == 0) {
        struct report own = {.backend = NULL};
        const struct outlet outlet = {&own, ends[1]};
        close(ends[0]);
        crash_pipe = ends[1];
        command_no_memory = on_no_memory;
        (void)prctl(PR_SET_CHILD_SUBREAPER, 1); /* processes that calls leave come to us */
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        int value = run(user, &outlet, worker->begun);
        report_finish(&own);
        fflush(NULL);
        put_frame(ends[1], OUTLET_STAGE, 0, "end", ""); /* what it has left for the end runs */
        put_frame(ends[1], OUTLET_END, value, "", "");
        exit(value);
    }
    close(ends[1]);
    worker->hung = worker->lacked_memory = false;
    if (process > 0 && clock_getcpuclockid(process, &worker->processor) != 0) {
        worker->processor = CLOCK_MONOTONIC;
    }
    /* A process that the backend left may hold the pipe open: its end is not waited for. */
    bool ended = false;
    for (bool more = process > 0; more;) {
        struct pollfd waits = {ends[0], POLLIN, 0};
        const bool there = poll(&waits, 1, ended ? 0 : 100) > 0;
        more = there ? take_frame(worker, ends[0]) : !ended;
        ended = ended || (!there && waitpid(process, status, WNOHANG) == process);
        if (!there && !ended && !worker->hung && is_late(worker, seconds)) {
            worker->hung = kill(process, SIGKILL) == 0;
        }
    }
    close(ends[0]);
    while (process > 0 && !ended && waitpid(process, status, 0) < 0 && errno == EINTR) {
    }
    return process > 0;
}

int workers_run(struct report *report, worker_run *run, void *user, int32_t case_seconds,
                bool fail_fast)
{
    struct worker worker = {.report = report, .value = -1};
    bool again = true;
    int32_t crashes = 0, hangs = 0;
    while (again) {
        char text[sizeof((struct trial *)0)->message];
        int status = 0;
        worker.value = -1;
        if (!run_worker(&worker, run, user, case_seconds, &status)) {
            report_add(report, "start", TRIAL_FAILED, strerror(errno));
            break;
        }
        const bool ended = WIFEXITED(status) && WEXITSTATUS(status) == worker.value;
        again = !ended && worker.current != NULL && worker.is_case;
        if (!ended) {
            const char *name = worker.current != NULL ? worker.current : "between cases";
            say_end(&worker, case_seconds, status, text, sizeof text);
            report_add(report, name, TRIAL_FAILED, text);
        }
        crashes += !worker.lacked_memory;
        hangs += worker.hung;
        const bool enough = crashes == MAX_CRASHES || hangs == MAX_HANGS;
        if (again && enough) {
            snprintf(text, sizeof text, "this was the last of %d %s after which no case is run",
                     hangs == MAX_HANGS ? MAX_HANGS : MAX_CRASHES,
                     hangs == MAX_HANGS ? "hangs" : "crashes");
            report_add(report, "between cases", TRIAL_FAILED, text);
        }
        again = again && !enough && !fail_fast;
        free(worker.current);
        free(worker.crash);
        worker.current = worker.crash = NULL;
    }
    return worker.value < 0 ? EXIT_FAILURE : worker.value;
}
