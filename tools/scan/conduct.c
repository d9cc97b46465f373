/* SPDX-License-Identifier: Apache-2.0 */
#include "conduct.h"

#include <fcntl.h>
#include <locale.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "util/hash.h"

extern char **environ;

static uint64_t hash_environment(void)
{
    uint64_t hash = HASH_INIT;
    for (char **variable = environ; variable != NULL && *variable != NULL; variable++) {
        hash = hash_string(hash, *variable);
    }
    return hash;
}

/* Control bits only: the exceptions that a computation raises are nobody's setting. */
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

static void read_folder(const char *path, struct stat *info)
{
    memset(info, 0, sizeof *info);
    (void)stat(path, info);
}

void conduct_read(struct conduct *conduct, int descriptor)
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
    conduct->descriptor = descriptor;
}

static int same_place(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

const char *conduct_difference(const struct conduct *before, char *text, size_t size)
{
    struct conduct now;
    conduct_read(&now, before->descriptor);
    for (int i = 1; i < CONDUCT_SIGNALS; i++) {
        if (now.actions[i].sa_handler != before->actions[i].sa_handler) {
            snprintf(text, size, "the handler of signal %d", i);
            return text;
        }
    }
    for (int i = 1; i < CONDUCT_SIGNALS; i++) {
        if (sigismember(&now.blocked, i) != sigismember(&before->blocked, i)) {
            snprintf(text, size, "whether signal %d is blocked", i);
            return text;
        }
    }
    for (int i = 0; i <= 2; i++) {
        if (fcntl(i, F_GETFD) < 0) {
            return "descriptors that are not its own: it closed one";
        }
    }
    const struct {
        int differs;
        const char *what;
    } rest[] = {
        {fcntl(before->descriptor, F_GETFD) < 0, "descriptors that are not its own: it closed one"},
        {now.locale != before->locale, "the locale"},
        {now.environment != before->environment, "the environment"},
        {!same_place(&now.folder, &before->folder), "the working directory"},
        {!same_place(&now.root, &before->root), "the root directory"},
        {now.mask != before->mask, "the file mode mask"},
        {now.rounding != before->rounding, "the rounding mode"},
        {now.float_control != before->float_control, "the floating-point control word"},
    };
    for (size_t i = 0; i < sizeof rest / sizeof *rest; i++) {
        if (rest[i].differs) {
            return rest[i].what;
        }
    }
    return NULL;
}
