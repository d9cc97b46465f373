/* SPDX-License-Identifier: Apache-2.0 */
#include "count_instructions.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/perf_event.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#endif

#define MAX_ARGUMENTS 40

#if defined(__linux__)

int counter_open(void)
{
    struct perf_event_attr attributes;
    memset(&attributes, 0, sizeof attributes);
    attributes.size = sizeof attributes;
    attributes.type = PERF_TYPE_HARDWARE;
    attributes.config = PERF_COUNT_HW_INSTRUCTIONS;
    attributes.disabled = 1;
    attributes.exclude_kernel = 1;
    attributes.exclude_hv = 1;
    return (int)syscall(SYS_perf_event_open, &attributes, 0, -1, -1, 0);
}

void counter_close(int counter)
{
    close(counter);
}

void counter_start(int counter)
{
    ioctl(counter, PERF_EVENT_IOC_RESET, 0);
    ioctl(counter, PERF_EVENT_IOC_ENABLE, 0);
}

int64_t counter_stop(int counter)
{
    uint64_t count = 0;
    ioctl(counter, PERF_EVENT_IOC_DISABLE, 0);
    return read(counter, &count, sizeof count) == (ssize_t)sizeof count ? (int64_t)count : -1;
}

#else

int counter_open(void)
{
    return -1;
}

void counter_close(int counter)
{
}

void counter_start(int counter)
{
}

int64_t counter_stop(int counter)
{
    return -1;
}

#endif

/* Starts `program` with one of its outputs on a pipe. */
static FILE *start(char *const *arguments, int output, pid_t *child)
{
    int ends[2];
    if (pipe(ends) != 0) {
        return NULL;
    }
    fflush(NULL);
    *child = fork();
    if (*child == 0) {
        dup2(ends[1], output);
        close(ends[0]);
        close(ends[1]);
        execvp(arguments[0], arguments);
        _exit(127);
    }
    close(ends[1]);
    if (*child < 0) {
        close(ends[0]);
        return NULL;
    }
    return fdopen(ends[0], "r");
}

static int own_path(char *path, size_t size)
{
    ssize_t length = readlink("/proc/self/exe", path, size - 1);
    path[length > 0 ? length : 0] = '\0';
    return length > 0;
}

int64_t callgrind_count(char *const *arguments, const char *function, char *why, size_t size)
{
    char path[4096], toggle[128], line[1024];
    char *all[MAX_ARGUMENTS] = {(char *)"valgrind", (char *)"--tool=callgrind",
                                (char *)"--callgrind-out-file=/dev/null", toggle};
    long long collected = -1;
    int32_t count = 4;
    pid_t child;
    int status = 0;
    if (!own_path(path, sizeof path)) {
        snprintf(why, size, "/proc/self/exe cannot be read");
        return -1;
    }
    snprintf(toggle, sizeof toggle, "--toggle-collect=%s", function);
    all[count++] = path;
    while (*arguments != NULL && count < MAX_ARGUMENTS - 1) {
        all[count++] = *arguments++;
    }
    FILE *output = start(all, STDERR_FILENO, &child);
    if (output == NULL) {
        snprintf(why, size, "valgrind cannot be started");
        return -1;
    }
    snprintf(why, size, "valgrind counted nothing");
    while (fgets(line, sizeof line, output) != NULL) {
        const char *at = strstr(line, "Collected : ");
        if (at != NULL) {
            collected = strtoll(at + strlen("Collected : "), NULL, 10);
        } else if (strncmp(line, "attn-bench: ", 12) == 0) {
            snprintf(why, size, "%.*s", (int)strcspn(line + 12, "\n"), line + 12);
        }
    }
    fclose(output);
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
        snprintf(why, size, "valgrind is not installed");
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 && collected > 0 ? collected : -1;
}

double child_number(char *const *arguments)
{
    char path[4096], line[256] = "";
    char *all[MAX_ARGUMENTS] = {path};
    int32_t count = 1;
    pid_t child;
    int status = 0;
    if (!own_path(path, sizeof path)) {
        return -1;
    }
    while (*arguments != NULL && count < MAX_ARGUMENTS - 1) {
        all[count++] = *arguments++;
    }
    FILE *output = start(all, STDOUT_FILENO, &child);
    if (output == NULL) {
        return -1;
    }
    char *read = fgets(line, sizeof line, output);
    fclose(output);
    waitpid(child, &status, 0);
    bool good = read != NULL && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    return good ? strtod(line, NULL) : -1;
}
