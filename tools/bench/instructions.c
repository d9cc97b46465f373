/* SPDX-License-Identifier: Apache-2.0 */
#include "instructions.h"

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

__attribute__((noinline)) attn_status instructions_run(const struct work *work)
{
    attn_status status = ATTN_OK;
    for (int32_t i = 0; i < COUNTED_CALLS && status == ATTN_OK; i++) {
        status = work->run(work->user, 0, NULL);
    }
    return status;
}

double instructions_count(const struct work *work)
{
    double result = -1;
#if defined(__linux__)
    struct perf_event_attr attributes = {.size = sizeof attributes,
                                         .type = PERF_TYPE_HARDWARE,
                                         .config = PERF_COUNT_HW_INSTRUCTIONS,
                                         .disabled = 1,
                                         .exclude_kernel = 1,
                                         .exclude_hv = 1};
    int counter = (int)syscall(SYS_perf_event_open, &attributes, 0, -1, -1, 0);
    uint64_t count = 0;
    if (counter < 0) {
        return -1;
    }
    ioctl(counter, PERF_EVENT_IOC_ENABLE, 0);
    attn_status status = instructions_run(work);
    ioctl(counter, PERF_EVENT_IOC_DISABLE, 0);
    if (status == ATTN_OK && read(counter, &count, sizeof count) == (ssize_t)sizeof count) {
        result = (double)count / COUNTED_CALLS;
    }
    close(counter);
#endif
    return result;
}

/* Starts a program with stderr on a pipe. */
static FILE *start(char *const *arguments, pid_t *child)
{
    int ends[2];
    if (pipe(ends) != 0) {
        return NULL;
    }
    fflush(NULL);
    *child = fork();
    if (*child == 0) {
        dup2(ends[1], STDERR_FILENO);
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

double instructions_of_process(char *const *arguments, char *why, size_t size)
{
    char path[4096], line[1024];
    char *all[MAX_ARGUMENTS] = {(char *)"valgrind", (char *)"--tool=callgrind",
                                (char *)"--callgrind-out-file=/dev/null",
                                (char *)"--toggle-collect=instructions_run", path};
    double collected = -1;
    pid_t child;
    int status = 0;
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    path[length > 0 ? length : 0] = '\0';
    for (int32_t count = 5; *arguments != NULL && count < MAX_ARGUMENTS - 1; count++) {
        all[count] = *arguments++;
    }
    FILE *output = start(all, &child);
    snprintf(why, size, "valgrind counted nothing");
    while (output != NULL && fgets(line, sizeof line, output) != NULL) {
        const char *at = strstr(line, "Collected : ");
        if (at != NULL) {
            collected = strtod(at + strlen("Collected : "), NULL);
        } else if (strncmp(line, "attn-bench: ", 12) == 0) {
            snprintf(why, size, "%.*s", (int)strcspn(line + 12, "\n"), line + 12);
        }
    }
    if (output == NULL) {
        snprintf(why, size, "valgrind cannot be started");
        return -1;
    }
    fclose(output);
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
        snprintf(why, size, "valgrind is not installed");
    }
    bool good = WIFEXITED(status) && WEXITSTATUS(status) == 0 && collected > 0;
    return good ? collected / COUNTED_CALLS : -1;
}
