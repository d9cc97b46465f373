/* SPDX-License-Identifier: Apache-2.0 */
/* The scanner's process and the pipe to it. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "runtime/load.h"
#include "runtime/isolation/isolation.h"
#include "runtime/runtime.h"

#define HELLO_SIZE (sizeof SCAN_HELLO - 1)
#define VERSION_SIZE (sizeof SCAN_VERSION - 1)
#define TICK_MS 50
/* A process that is killed while a driver holds it in the kernel stays; it is not waited for longer
 * than this. */
#define GRAVE_MS 1000

extern char **environ;

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Next to the core: in a build tree, or installed. */
static bool scanner_path(char path[PATH_MAX])
{
    char folder[PATH_MAX];
    bool build_tree;
    if (!core_place(folder, &build_tree)) {
        return false;
    }
    int length = snprintf(path, PATH_MAX, "%s/%s/attn-scan", folder, build_tree ? "tools" : "attn");
    return length < PATH_MAX && access(path, X_OK) == 0;
}

/* Its own group, so that what it starts ends with it; no signal blocked, ignored or handled; only
 * the pipe and what the engine left open without FD_CLOEXEC, which the scanner closes. */
static int spawn(const char *scanner, const char *file, int write_end, pid_t *pid)
{
    char *const arguments[] = {(char *)(uintptr_t)scanner, (char *)(uintptr_t)file, NULL};
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t all, none;
    int failed = posix_spawn_file_actions_init(&actions);
    if (failed != 0) {
        return failed;
    }
    failed = posix_spawnattr_init(&attributes);
    if (failed == 0) {
        sigfillset(&all);
        sigemptyset(&none);
        posix_spawnattr_setsigdefault(&attributes, &all);
        posix_spawnattr_setsigmask(&attributes, &none);
        posix_spawnattr_setpgroup(&attributes, 0);
        posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK |
                                                  POSIX_SPAWN_SETPGROUP);
        failed = posix_spawn_file_actions_adddup2(&actions, write_end, STDOUT_FILENO);
        failed =
            failed ? failed : posix_spawn(pid, scanner, &actions, &attributes, arguments, environ);
        posix_spawnattr_destroy(&attributes);
    }
    posix_spawn_file_actions_destroy(&actions);
    return failed;
}

/* Looks without reaping, so that the pid stays ours. */
static void look(struct scan *child)
{
    siginfo_t info = {.si_pid = 0};
    if (child->ended || child->lost) {
        return;
    }
    if (waitid(P_PID, (id_t)child->pid, &info, WEXITED | WNOHANG | WNOWAIT) != 0) {
        child->lost = errno == ECHILD;
    } else if (info.si_pid == child->pid) {
        child->ended = true;
        child->code = info.si_code;
        child->value = info.si_status;
    }
}

/* What is in the pipe. */
static void drain(struct scan *child, struct text *answer)
{
    char bytes[4096];
    while (child->open && !answer->failed && !child->too_much) {
        ssize_t size = read(child->pipe, bytes, sizeof bytes);
        if (size < 0 && errno == EINTR) {
            continue;
        }
        if (size < 0 && errno == EAGAIN) {
            return;
        }
        child->open = size > 0;
        if (size > 0) {
            text_add_bytes(answer, bytes, (size_t)size);
            child->too_much = answer->length > RECORD_MAX_SIZE;
        }
    }
}

/* Until the child has ended, its time is over, or it has said too much. */
static void watch(struct scan *child, struct text *answer)
{
    int64_t rest;
    long pause = 20000; /* ns: between the pipe's end and the process's */
    while (!answer->failed && !child->too_much) {
        look(child);
        drain(child, answer);
        if (child->ended || (child->lost && !child->open)) {
            return;
        }
        rest = child->deadline - now_ms();
        if (rest <= 0) {
            child->late = true;
            return;
        }
        if (child->open) {
            struct pollfd wait = {.fd = child->pipe, .events = POLLIN};
            (void)poll(&wait, 1, (int)(rest < TICK_MS ? rest : TICK_MS));
        } else {
            (void)nanosleep(&(struct timespec){0, pause}, NULL);
            pause = pause < 10000000 ? 2 * pause : pause;
        }
    }
}

/* Ends what is left of it and its group, and reaps this pid alone. */
static void bury(struct scan *child)
{
    const int64_t until = now_ms() + GRAVE_MS;
    look(child);
    if (!child->lost) {
        (void)kill(-child->pid, SIGKILL);
        while (waitpid(child->pid, NULL, WNOHANG) == 0 && now_ms() < until) {
            (void)nanosleep(&(struct timespec){0, 100000}, NULL);
        }
    }
    close(child->pipe);
    child->running = false;
}

static const char *signal_name(int number)
{
    static const struct {
        int number;
        const char *name;
    } names[] = {{SIGSEGV, "SIGSEGV"}, {SIGABRT, "SIGABRT"}, {SIGILL, "SIGILL"},
                 {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},   {SIGKILL, "SIGKILL"},
                 {SIGTERM, "SIGTERM"}, {SIGPIPE, "SIGPIPE"}, {SIGTRAP, "SIGTRAP"},
                 {SIGSYS, "SIGSYS"},   {SIGXCPU, "SIGXCPU"}, {SIGINT, "SIGINT"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (names[i].number == number) {
            return names[i].name;
        }
    }
    return "a signal";
}

/* Where the plugin was when its process ended, from the last letter. */
static const char *stage_name(const char *at, size_t size)
{
    const char *name = "scan";
    for (size_t i = 0; i < size; i++) {
        name = at[i] == 'C'   ? "constructor"
               : at[i] == 'E' ? "entry"
               : at[i] == 'P' ? "probe"
                              : name;
    }
    return name;
}

static attn_status judge_exit(int value, const char *stage, struct attn_error *why)
{
    switch (value) {
    case SCAN_EXIT_NO_MEMORY:
        return error_set(why, ATTN_ERROR_OUT_OF_MEMORY, stage, "left no memory in its process");
    case SCAN_EXIT_NO_PIPE:
        return error_set(why, ATTN_ERROR_PLUGIN, stage, "closed a descriptor that is not its own");
    default:
        return error_set(why, ATTN_ERROR_PLUGIN, stage, "ended its process with exit status %d",
                         value);
    }
}

static attn_status judge(const attn_runtime *runtime, const struct scan *child,
                         const struct text *answer, size_t *record, struct attn_error *why)
{
    size_t at = HELLO_SIZE;
    if (child->ended && child->code != CLD_EXITED && child->value == SIGKILL && !child->late &&
        !child->too_much) { /* by whoever is short of memory, or an operator */
        return error_set(why, ATTN_ERROR_IO, "scan",
                         "attn-scan was ended by signal %d (SIGKILL) before its answer",
                         child->value);
    }
    if (answer->length < HELLO_SIZE || memcmp(answer->data, SCAN_HELLO, HELLO_SIZE) != 0) {
        return child->late || child->lost
                   ? error_set(why, ATTN_ERROR_NOT_FOUND, "scan", "attn-scan does not run: %s",
                               child->late ? "it says nothing" : "it ends at once")
                   : error_set(why, ATTN_ERROR_NOT_FOUND, "scan", "attn-scan does not run: %s %d",
                               child->code == CLD_EXITED ? "exit status" : "signal", child->value);
    }
    if (answer->length < at + VERSION_SIZE ||
        memcmp(answer->data + at, SCAN_VERSION, VERSION_SIZE) != 0) {
        return error_set(why, ATTN_ERROR_IO, "scan",
                         "attn-scan next to the core is of another version than the core, %s",
                         ATTN_LIBRARY_VERSION);
    }
    at += VERSION_SIZE;
    const size_t stages = at;
    at += strspn(answer->data + at, SCAN_STAGES);
    const char *stage = stage_name(answer->data + stages, at - stages);
    *record = at;
    if (child->late) {
        return error_set(why, ATTN_ERROR_TIMEOUT, stage, "did not end within %d ms",
                         runtime->settings.probe_deadline_ms);
    }
    if (child->too_much) {
        return error_set(why, ATTN_ERROR_PLUGIN, stage,
                         "more than %zu bytes came out of its process", RECORD_MAX_SIZE);
    }
    if (child->ended && child->code != CLD_EXITED) {
        return error_set(why, ATTN_ERROR_PLUGIN, stage, "its process was ended by signal %d (%s)",
                         child->value, signal_name(child->value));
    }
    if (at == answer->length) {
        return child->lost
                   ? error_set(why, ATTN_ERROR_PLUGIN, stage, "its process ended without an answer")
                   : judge_exit(child->value, stage, why);
    }
    return ATTN_OK;
}

attn_status scan_begin(const attn_runtime *runtime, const char *file, struct scan *scan,
                       struct attn_error *why)
{
    char scanner[PATH_MAX];
    int ends[2];
    pid_t pid = -1;
    *scan = (struct scan){.open = true};
    if (!scanner_path(scanner)) {
        return error_set(why, ATTN_ERROR_NOT_FOUND, "scan",
                         "there is no attn-scan next to the core");
    }
    if (pipe2(ends, O_CLOEXEC) != 0) {
        return error_set(why, ATTN_ERROR_IO, "scan", "no pipe to attn-scan: %s", strerror(errno));
    }
    int failed =
        fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0 ? spawn(scanner, file, ends[1], &pid) : errno;
    close(ends[1]);
    if (failed != 0) {
        close(ends[0]);
        const bool short_of = failed == EAGAIN || failed == ENOMEM || failed == EMFILE ||
                              failed == ENFILE || failed == EBADF;
        return error_set(why, short_of ? ATTN_ERROR_IO : ATTN_ERROR_NOT_FOUND, "scan",
                         "%s cannot be started: %s", scanner, strerror(failed));
    }
    scan->running = true;
    scan->pid = pid;
    scan->pipe = ends[0];
    scan->deadline = now_ms() + runtime->settings.probe_deadline_ms;
    return ATTN_OK;
}

attn_status scan_finish(const attn_runtime *runtime, struct scan *scan, struct text *answer,
                        size_t *record, struct attn_error *why)
{
    drain(scan, answer);
    if (answer->length > PIPE_BUF) { /* it may have waited for us to read */
        scan->deadline = now_ms() + runtime->settings.probe_deadline_ms;
    }
    watch(scan, answer);
    bury(scan);
    return answer->failed ? error_set(why, ATTN_ERROR_OUT_OF_MEMORY, "scan",
                                      "no memory for the scanner's answer")
                          : judge(runtime, scan, answer, record, why);
}

void scan_abandon(struct scan *scan)
{
    if (scan->running) {
        bury(scan);
    }
}
