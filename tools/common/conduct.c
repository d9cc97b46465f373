/* SPDX-License-Identifier: Apache-2.0 */
#include "conduct.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "util/hash.h"
#include "util/safe_text.h"

#define LIBC_RESTORER 0x04000000 /* the kernel's SA_RESTORER, which libc's headers hide */

extern char **environ;

static uint64_t hash_environment(void)
{
    uint64_t hash = HASH_INIT;
    for (char **variable = environ; variable != NULL && *variable != NULL; variable++) {
        hash = hash_string(hash, *variable);
    }
    return hash;
}

/* Control bits only: the exceptions that a computation raises are no setting. */
static uint32_t float_control(void)
{
#if defined(__x86_64__)
    return __builtin_ia32_stmxcsr() & 0xffc0u;
#elif defined(__aarch64__)
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return (uint32_t)control;
#else
    return 0;
#endif
}

static void set_float_control(uint32_t control)
{
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr((__builtin_ia32_stmxcsr() & ~0xffc0u) | control);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)control));
#endif
}

static int count_threads(void)
{
    DIR *folder = opendir("/proc/self/task");
    const struct dirent *entry;
    int count = 0;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        count += entry->d_name[0] != '.';
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return count;
}

/* More than there were; a thread that was joined may still be there for a moment. */
static bool has_threads(int before)
{
    for (int waits = 0; waits < 100 && count_threads() > before; waits++) {
        (void)usleep(2000);
    }
    return count_threads() > before;
}

static uint64_t hash_limits(void)
{
    uint64_t hash = HASH_INIT;
    for (int i = 0; i < RLIM_NLIMITS; i++) {
        struct rlimit limit = {0, 0};
        (void)getrlimit((__rlimit_resource_t)i, &limit);
        hash = hash_bytes(hash, &limit, sizeof limit);
    }
    return hash;
}

/* Which are armed; the scanner's own alarm goes on counting down. */
static uint64_t hash_timers(void)
{
    char text[2048];
    uint64_t hash = HASH_INIT;
    for (int i = ITIMER_REAL; i <= ITIMER_PROF; i++) {
        struct itimerval timer;
        (void)getitimer((__itimer_which_t)i, &timer);
        const int armed = timer.it_value.tv_sec != 0 || timer.it_value.tv_usec != 0;
        const int repeats = timer.it_interval.tv_sec != 0 || timer.it_interval.tv_usec != 0;
        hash = hash_bytes(hash, (int[]){armed, repeats}, 2 * sizeof armed);
    }
    const int file = open("/proc/self/timers", O_RDONLY | O_CLOEXEC);
    const ssize_t size = file >= 0 ? read(file, text, sizeof text) : 0;
    if (file >= 0) {
        close(file);
    }
    return size > 0 ? hash_bytes(hash, text, (size_t)size) : hash;
}

/* Is it a child of this process? */
static int is_child(const char *pid)
{
    char path[64], text[512];
    int parent = 0;
    snprintf(path, sizeof path, "/proc/%.20s/stat", pid);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t size = file >= 0 ? read(file, text, sizeof text - 1) : 0;
    if (file >= 0) {
        close(file);
    }
    text[size > 0 ? size : 0] = '\0';
    const char *behind = strrchr(text, ')'); /* the name before may have any character */
    return behind != NULL && sscanf(behind + 1, " %*c %d", &parent) == 1 && parent == (int)getpid();
}

int conduct_end_children(void)
{
    int ended = 0;
    /* those of a child that ends become ours, so it is looked again until there are none */
    while (waitpid(-1, NULL, WNOHANG) >= 0 || errno == EINTR) {
        DIR *folder = opendir("/proc");
        const struct dirent *entry;
        int found = 0;
        while (folder != NULL && (entry = readdir(folder)) != NULL) {
            if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && is_child(entry->d_name)) {
                found += kill((pid_t)atoi(entry->d_name), SIGKILL) == 0;
            }
        }
        if (folder != NULL) {
            closedir(folder);
        }
        if (found == 0) {
            break;
        }
        ended += found;
        (void)waitpid(-1, NULL, 0);
    }
    return ended;
}

static void read_folder(const char *path, struct stat *info)
{
    memset(info, 0, sizeof *info);
    (void)stat(path, info);
}

int conduct_catch_output(void)
{
    int ends[2];
    fflush(stdout);
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
        return -1;
    }
    const bool caught = dup2(ends[1], STDOUT_FILENO) == STDOUT_FILENO;
    close(ends[1]);
    if (!caught) {
        close(ends[0]);
    }
    return caught ? ends[0] : -1;
}

/* The first of what was written on standard output since, the rest is drained; 0: nothing. */
static size_t read_output(int output, char *text, size_t size)
{
    char more[4096];
    fflush(stdout);
    ssize_t length = output >= 0 ? read(output, text, size - 1) : 0;
    size_t used = length > 0 ? (size_t)length : 0;
    while (length > 0) {
        length = read(output, more, sizeof more);
    }
    text[used] = '\0';
    return used;
}

void conduct_read(struct conduct *conduct, int descriptor, int output, bool threads)
{
    memset(conduct, 0, sizeof *conduct);
    for (int i = 1; i < CONDUCT_SIGNALS; i++) {
        (void)sigaction(i, NULL, &conduct->actions[i]);
    }
    (void)sigprocmask(SIG_SETMASK, NULL, &conduct->blocked);
    conduct->locale = hash_string(HASH_INIT, setlocale(LC_ALL, NULL));
    conduct->environment = hash_environment();
    read_folder(".", &conduct->folder);
    read_folder("/", &conduct->root);
    conduct->mask = umask(0);
    (void)umask(conduct->mask);
    conduct->rounding = fegetround();
    conduct->float_control = float_control();
    (void)sigaltstack(NULL, &conduct->signal_stack);
    conduct->threads = threads ? count_threads() : -1;
    conduct->descriptor = descriptor;
    conduct->output = output;
    conduct->limits = hash_limits();
    conduct->timers = hash_timers();
    (void)sched_getaffinity(0, sizeof conduct->processors, &conduct->processors);
    conduct->niceness = getpriority(PRIO_PROCESS, 0);
    for (int i = 0; i <= 2; i++) {
        (void)fstat(i, &conduct->streams[i]);
    }
}

static int same_place(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

const char *conduct_difference(const struct conduct *before, char *text, size_t size)
{
    struct conduct now;
    char output[48];
    conduct_read(&now, before->descriptor, before->output, false);
    for (int i = 1; i < CONDUCT_SIGNALS; i++) {
        if (now.actions[i].sa_handler != before->actions[i].sa_handler) {
            snprintf(text, size, "changed the handler of signal %d", i);
            return text;
        }
        /* libc copies more of a mask than the kernel has filled, and marks what it hands over: an
         * action that was put back is not another one */
        if ((now.actions[i].sa_flags | LIBC_RESTORER) !=
                (before->actions[i].sa_flags | LIBC_RESTORER) ||
            memcmp(&now.actions[i].sa_mask, &before->actions[i].sa_mask, CONDUCT_SIGNALS / 8) !=
                0) {
            snprintf(text, size, "changed the flags or mask of signal %d", i);
            return text;
        }
    }
    for (int i = 1; i < CONDUCT_SIGNALS; i++) {
        if (sigismember(&now.blocked, i) != sigismember(&before->blocked, i)) {
            snprintf(text, size, "changed whether signal %d is blocked", i);
            return text;
        }
    }
    for (int i = 0; i <= 2; i++) {
        if (fcntl(i, F_GETFD) < 0) {
            return "changed descriptors that are not its own: it closed one";
        }
        if (!same_place(&now.streams[i], &before->streams[i])) {
            snprintf(text, size, "changed where descriptor %d leads", i);
            return text;
        }
    }
    const struct {
        int differs;
        const char *what;
    } rest[] = {
        {before->descriptor >= 0 && fcntl(before->descriptor, F_GETFD) < 0,
         "descriptors that are not its own: it closed one"},
        {now.locale != before->locale, "the locale"},
        {now.environment != before->environment, "the environment"},
        {!same_place(&now.folder, &before->folder), "the working directory"},
        {!same_place(&now.root, &before->root), "the root directory"},
        {now.mask != before->mask, "the file mode mask"},
        {now.rounding != before->rounding, "the rounding mode"},
        {now.float_control != before->float_control, "the floating-point control word"},
        {now.signal_stack.ss_sp != before->signal_stack.ss_sp ||
             now.signal_stack.ss_flags != before->signal_stack.ss_flags,
         "the stack of signal handlers"},
        {now.limits != before->limits, "a resource limit"},
        {now.timers != before->timers, "the timers"},
        {!CPU_EQUAL(&now.processors, &before->processors), "the processors that it may run on"},
        {now.niceness != before->niceness, "the niceness"},
    };
    for (size_t i = 0; i < sizeof rest / sizeof *rest; i++) {
        if (rest[i].differs) {
            snprintf(text, size, "changed %s", rest[i].what);
            return text;
        }
    }
    if (read_output(before->output, output, sizeof output) > 0) {
        text_make_safe(output, false);
        snprintf(text, size, "wrote on standard output: '%s'", output);
        return text;
    }
    return before->threads >= 0 && has_threads(before->threads) ? "left a thread that runs" : NULL;
}

void conduct_restore(const struct conduct *before)
{
    for (int i = 1; i < CONDUCT_SIGNALS; i++) {
        (void)sigaction(i, &before->actions[i], NULL);
    }
    (void)sigprocmask(SIG_SETMASK, &before->blocked, NULL);
    (void)sigaltstack(&before->signal_stack, NULL);
    (void)umask(before->mask);
    (void)fesetround(before->rounding);
    set_float_control(before->float_control);
}
