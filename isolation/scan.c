/* SPDX-License-Identifier: Apache-2.0 */
/* The scanner's process and the file that it fills. */
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "host/cache_file.h"
#include "runtime/load.h"
#include "isolation.h"
#include "runtime/runtime.h"
#include "util/text.h"

#define TICK_NS 1000000
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

bool scanner_path(char path[PATH_MAX])
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
 * the file and what the engine left open without FD_CLOEXEC, which the scanner closes. */
static int spawn(const char *scanner, const char *file, int answer, pid_t *pid)
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
        failed = posix_spawn_file_actions_adddup2(&actions, answer, STDOUT_FILENO);
        failed =
            failed ? failed : posix_spawn(pid, scanner, &actions, &attributes, arguments, environ);
        posix_spawnattr_destroy(&attributes);
    }
    posix_spawn_file_actions_destroy(&actions);
    return failed;
}

/* How a scanner's process came to its end. */
struct end {
    bool ended; /* by itself */
    bool lost; /* reaped by others, as where SIGCHLD is ignored: its pid may be another process's */
    bool late, too_much;
    int code, value; /* how it ended: CLD_EXITED or CLD_KILLED, status or signal */
};

/* Looks without reaping, so that the pid stays ours. */
static bool has_ended(const struct scan *scan, struct end *end)
{
    siginfo_t info = {.si_pid = 0};
    if (waitid(P_PID, (id_t)scan->pid, &info, WEXITED | WNOHANG | WNOWAIT) != 0) {
        end->lost = errno == ECHILD;
    } else if (info.si_pid == scan->pid) {
        end->ended = true;
        end->code = info.si_code;
        end->value = info.si_status;
    }
    return end->ended || end->lost;
}

/* Until the process has ended, its time is over, or it has said too much. */
static struct end watch(const struct scan *scan)
{
    struct end end = {.ended = false};
    long pause = 20000; /* ns */
    for (;;) {
        struct stat info;
        const bool over = has_ended(scan, &end);
        end.too_much = fstat(scan->file, &info) == 0 && info.st_size > (off_t)SCAN_MAX_SIZE;
        end.late = !over && now_ms() >= scan->deadline;
        if (over || end.too_much || end.late) {
            return end;
        }
        (void)nanosleep(&(struct timespec){0, pause}, NULL);
        pause = 2 * pause < TICK_NS ? 2 * pause : TICK_NS;
    }
}

/* Ends what is left of it and its group, and reaps this pid alone. */
static void bury(const struct scan *scan)
{
    const int64_t until = now_ms() + GRAVE_MS;
    struct end end = {.ended = false};
    (void)has_ended(scan, &end);
    if (!end.lost) {
        (void)kill(-scan->pid, SIGKILL);
        while (waitpid(scan->pid, NULL, WNOHANG) == 0 && now_ms() < until) {
            (void)nanosleep(&(struct timespec){0, 100000}, NULL);
        }
    }
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

static attn_status judge_exit(int value, const char *stage, struct attn_error *why)
{
    switch (value) {
    case SCAN_EXIT_NO_MEMORY:
        return error_set(why, ATTN_ERROR_OUT_OF_MEMORY, stage, "left no memory in its process");
    case SCAN_EXIT_NO_FILE:
        return error_set(why, ATTN_ERROR_PLUGIN, stage, "closed a descriptor that is not its own");
    default:
        return error_set(why, ATTN_ERROR_PLUGIN, stage, "ended its process with exit status %d",
                         value);
    }
}

/* ATTN_OK: a record follows the head. */
static attn_status judge(const attn_runtime *runtime, const struct end *end,
                         const struct scan_head *head, bool answered, struct attn_error *why)
{
    const char *stage = text_is_name(head->stage) ? head->stage : "scan";
    if (end->ended && end->code != CLD_EXITED && end->value == SIGKILL && !end->too_much) {
        /* by whoever is short of memory, or an operator */
        return error_set(why, ATTN_ERROR_IO, "scan",
                         "attn-scan was ended by signal %d (SIGKILL) before its answer",
                         end->value);
    }
    if (strncmp(head->version, SCAN_HELLO, sizeof SCAN_HELLO - 1) != 0) {
        return end->ended
                   ? error_set(why, ATTN_ERROR_NOT_FOUND, "scan", "attn-scan does not run: %s %d",
                               end->code == CLD_EXITED ? "exit status" : "signal", end->value)
                   : error_set(why, ATTN_ERROR_NOT_FOUND, "scan", "attn-scan does not run: %s",
                               end->lost ? "it ends at once" : "it says nothing");
    }
    if (strcmp(head->version, SCAN_VERSION) != 0) {
        return error_set(why, ATTN_ERROR_IO, "scan",
                         "attn-scan next to the core is of another version than the core, %s",
                         ATTN_LIBRARY_VERSION);
    }
    if (end->late) {
        return error_set(why, ATTN_ERROR_TIMEOUT, stage, "did not end within %d ms",
                         runtime->settings.probe_deadline_ms);
    }
    if (end->too_much) {
        return error_set(why, ATTN_ERROR_PLUGIN, stage,
                         "more than %zu bytes came out of its process", RECORD_MAX_SIZE);
    }
    if (end->ended && end->code != CLD_EXITED) {
        return error_set(why, ATTN_ERROR_PLUGIN, stage, "its process was ended by signal %d (%s)",
                         end->value, signal_name(end->value));
    }
    if (!answered) {
        return end->lost
                   ? error_set(why, ATTN_ERROR_PLUGIN, stage, "its process ended without an answer")
                   : judge_exit(end->value, stage, why);
    }
    return ATTN_OK;
}

/* ATTN_ERROR_IO: this process or the machine is short of something. */
static attn_status not_started(const char *what, int number, struct attn_error *why)
{
    const bool short_of = number == EAGAIN || number == ENOMEM || number == EMFILE ||
                          number == ENFILE || number == EBADF;
    return error_set(why, short_of ? ATTN_ERROR_IO : ATTN_ERROR_NOT_FOUND, "scan", "%s: %s", what,
                     strerror(number));
}

attn_status scan_begin(const attn_runtime *runtime, const char *file, struct scan *scan,
                       struct attn_error *why)
{
    char scanner[PATH_MAX], what[PATH_MAX + 32];
    pid_t pid = -1;
    if (!scanner_path(scanner)) {
        return error_set(why, ATTN_ERROR_NOT_FOUND, "scan",
                         "there is no attn-scan next to the core");
    }
    const int answer = memfd_create("attn-scan", MFD_CLOEXEC);
    if (answer < 0) {
        return not_started("no file for attn-scan", errno, why);
    }
    const int failed = spawn(scanner, file, answer, &pid);
    if (failed != 0) {
        close(answer);
        snprintf(what, sizeof what, "%s cannot be started", scanner);
        return not_started(what, failed, why);
    }
    *scan = (struct scan){true, pid, answer, now_ms() + runtime->settings.probe_deadline_ms};
    return ATTN_OK;
}

attn_status scan_finish(attn_runtime *runtime, struct scan *scan, struct answer *answer,
                        struct attn_error *why)
{
    struct cache_file file = {.descriptor = scan->file};
    struct scan_head head = {.stage = ""};
    const char *wrong = NULL;
    const struct end end = watch(scan);
    bury(scan);
    scan->running = false;
    (void)!pread(scan->file, &head, sizeof head, 0);
    head.version[sizeof head.version - 1] = head.stage[sizeof head.stage - 1] = '\0';
    /* a process that the plugin has put out of the group may still change the file */
    const bool answered = fstat(scan->file, &file.info) == 0 &&
                          file.info.st_size > (off_t)sizeof head &&
                          file.info.st_size <= (off_t)SCAN_MAX_SIZE &&
                          lseek(scan->file, sizeof head, SEEK_SET) == (off_t)sizeof head;
    attn_status status = judge(runtime, &end, &head, answered, why);
    if (status != ATTN_OK) {
        close(scan->file);
        return status;
    }
    file.info.st_size -= (off_t)sizeof head;
    TRY(answer_read(runtime, &file, answer, &wrong));
    return wrong == NULL
               ? ATTN_OK
               : error_set(why, ATTN_ERROR_PLUGIN, "scan", "what its process left %s", wrong);
}

void scan_abandon(struct scan *scan)
{
    if (scan->running) {
        bury(scan);
        close(scan->file);
        scan->running = false;
    }
}
