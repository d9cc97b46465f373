/* SPDX-License-Identifier: Apache-2.0 */
/* What the main functions of all tools share: options by a table, errors, exit status, files that a
 * user names, memory, clocks. */
#ifndef TOOLS_COMMON_COMMAND_H
#define TOOLS_COMMON_COMMAND_H

#include <attn/status.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>

#define EXIT_USAGE 2
#define EXIT_ABSENT 77 /* hardware */

/* Ends the function with the status of a call that fails; as core/util/error.h has it. */
#define TRY(call)                                                                                  \
    do {                                                                                           \
        const attn_status tried = (call);                                                          \
        if (tried != ATTN_OK) {                                                                    \
            return tried;                                                                          \
        }                                                                                          \
    } while (0)

/* An option "--name": what it sets is the first member that is not NULL; `parse` keeps any other
 * value. */
struct command_option {
    const char *name;
    bool *flag; /* without a value: becomes true, or false where `clears` */
    bool clears;
    const char **text;
    uint64_t *seed; /* a whole number from 0 */
    int32_t *count; /* a whole number from `least` to `most` */
    int32_t least, most;
    double *number;      /* above 0, up to `most` */
    const char *numbers; /* what these are: "seconds" */
    /* Takes `command.user` and the value; NULL, or what is wrong, as in "'x' is not one of …". */
    const char *(*parse)(void *user, const char *value);
};

struct command {
    const char *tool, *usage;
    void (*describe)(FILE *file); /* prints what follows the usage; NULL: nothing */
    const struct command_option *options;
    int32_t num_options;
    const char **operand; /* the one argument that is no option; NULL: no such argument */
    bool may_lack_operand;
    void *user;
};

/* Reads the command line; --help and --version are every tool's. -1: go on; else the exit status,
 * with the reason on stderr. */
int command_parse(const struct command *command, int argc, char **argv);

/* Writes status, field and message, and returns the status. */
attn_status command_error(struct attn_error *error, attn_status status, const char *field,
                          const char *format, ...) __attribute__((format(printf, 4, 5)));

/* `tool: what: field: message` on stderr. Returns EXIT_ABSENT where hardware is missing, else
 * EXIT_FAILURE. */
int command_failed(const char *tool, const char *what, const struct attn_error *error);

/* All of a file or pipe of at most `most` bytes, and a NUL after them; the caller frees it. NULL:
 * *why says why not. */
char *read_whole_file(const char *name, size_t most, size_t *size, const char **why);

/* calloc and realloc of what a tool cannot go on without: where there is no memory it ends here,
 * with a message and status 1, and what it has of a device is the system's to free. The message is
 * on stderr, or goes to `command_no_memory` where a tool has set that: once, from any thread. */
extern void (*command_no_memory)(const char *message);
void *command_calloc(size_t count, size_t size);
void *command_realloc(void *memory, size_t count, size_t size);

/* A clock as a number; 0 where there is no such clock: that of a process which has ended. */
static inline double seconds_of(clockid_t clock)
{
    struct timespec now;
    return clock_gettime(clock, &now) == 0 ? (double)now.tv_sec + 1e-9 * (double)now.tv_nsec : 0;
}

/* The exit status of a tool whose own is `code`: 1 in place of 0 where its output could not be
 * written, as on a full disk, with the reason on stderr. */
int command_end(const char *tool, int code);

#endif
