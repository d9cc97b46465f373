/* SPDX-License-Identifier: Apache-2.0 */
#include "command.h"

#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define FIRST_ROOM ((size_t)1 << 16) /* first buffer for a pipe, doubled as it goes on */

static int show_usage(const struct command *command, FILE *file, int code)
{
    fputs(command->usage, file);
    if (command->describe != NULL) {
        command->describe(file);
    }
    return code;
}

/* NULL, or what is wrong with the value. `text` has room for `size` bytes of it. */
static const char *take(const struct command *command, const struct command_option *option,
                        const char *value, char *text, size_t size)
{
    char *end = NULL;
    errno = 0;
    if (option->flag != NULL) {
        *option->flag = !option->clears;
    } else if (option->text != NULL) {
        *option->text = value;
    } else if (option->seed != NULL) {
        *option->seed = strtoull(value, &end, 10);
        return *value == '\0' || *value == '-' || *end != '\0' || errno != 0
                   ? "is not a whole number from 0"
                   : NULL;
    } else if (option->count != NULL) {
        const long count = strtol(value, &end, 10);
        *option->count = (int32_t)count;
        snprintf(text, size, "is not a whole number from %d to %d", option->least, option->most);
        return end == value || *end != '\0' || count < option->least || count > option->most ? text
                                                                                             : NULL;
    } else if (option->number != NULL) {
        *option->number = strtod(value, &end);
        snprintf(text, size, "is not %s above 0, up to %d", option->numbers, option->most);
        return end == value || *end != '\0' ||
                       !(*option->number > 0 && *option->number <= option->most)
                   ? text
                   : NULL;
    } else {
        return option->parse(command->user, value);
    }
    return NULL;
}

/* names: as getopt_long takes them. */
static int parse(const struct command *command, const struct option *names, int argc, char **argv)
{
    char text[80];
    int c;
    while ((c = getopt_long(argc, argv, "", names, NULL)) != -1) {
        if (c == 'h') {
            return show_usage(command, stdout, EXIT_SUCCESS);
        }
        if (c == 'v') {
            printf("%s %s\n", command->tool, ATTN_VERSION);
            return EXIT_SUCCESS;
        }
        if (c < 256) {
            return show_usage(command, stderr, EXIT_USAGE);
        }
        const struct command_option *option = &command->options[c - 256];
        const char *wrong = take(command, option, optarg, text, sizeof text);
        if (wrong != NULL) {
            fprintf(stderr, "%s: --%s: '%s' %s\n", command->tool, option->name, optarg, wrong);
            return EXIT_USAGE;
        }
    }
    const int operands = command->operand != NULL;
    if (optind + operands < argc) {
        fprintf(stderr, "%s: '%s' is no option\n", command->tool, argv[optind + operands]);
    }
    if (optind + operands < argc || (optind + operands > argc && !command->may_lack_operand)) {
        return show_usage(command, stderr, EXIT_USAGE);
    }
    if (optind < argc) {
        *command->operand = argv[optind];
    }
    return -1;
}

int command_parse(const struct command *command, int argc, char **argv)
{
    struct option *names = command_calloc((size_t)command->num_options + 3, sizeof *names);
    names[0] = (struct option){"help", no_argument, NULL, 'h'};
    names[1] = (struct option){"version", no_argument, NULL, 'v'};
    for (int32_t i = 0; i < command->num_options; i++) {
        const struct command_option *option = &command->options[i];
        names[2 + i] = (struct option){
            option->name, option->flag != NULL ? no_argument : required_argument, NULL, 256 + i};
    }
    const int code = parse(command, names, argc, argv);
    free(names);
    return code;
}

attn_status command_error(struct attn_error *error, attn_status status, const char *field,
                          const char *format, ...)
{
    va_list arguments;
    snprintf(error->field, sizeof error->field, "%s", field);
    va_start(arguments, format);
    vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    return error->status = status;
}

int command_failed(const char *tool, const char *what, const struct attn_error *error)
{
    fprintf(stderr, "%s: %s: %s%s%s\n", tool, what, error->field,
            error->field[0] != '\0' ? ": " : "", error->message);
    return error->status == ATTN_ERROR_ABSENT ? EXIT_ABSENT : EXIT_FAILURE;
}

char *read_whole_file(const char *name, size_t most, size_t *size, const char **why)
{
    struct stat info;
    FILE *in = fopen(name, "rbe");
    char *bytes = NULL;
    size_t room = 0;
    *why = in == NULL || fstat(fileno(in), &info) != 0            ? strerror(errno)
           : !S_ISREG(info.st_mode) && !S_ISFIFO(info.st_mode)    ? "not a regular file"
           : S_ISREG(info.st_mode) && (size_t)info.st_size > most ? "is too large"
                                                                  : NULL;
    *size = 0;
    while (*why == NULL && *size == room) {
        room = room > 0 ? 2 * room : S_ISREG(info.st_mode) ? (size_t)info.st_size + 1 : FIRST_ROOM;
        char *larger = realloc(bytes, room + 1);
        if (larger == NULL) {
            *why = "no memory";
            break;
        }
        bytes = larger;
        *size += fread(bytes + *size, 1, room - *size, in);
        *why = ferror(in) ? "cannot be read" : *size > most ? "is too large" : NULL;
    }
    if (in != NULL) {
        fclose(in);
    }
    if (*why != NULL) {
        free(bytes);
        return NULL;
    }
    bytes[*size] = '\0';
    return bytes;
}

void (*command_no_memory)(const char *message);

/* The memory, unless it is NULL: then the process ends, by the first thread that has none. */
static void *found(void *memory, size_t count, size_t size)
{
    static pthread_mutex_t ends = PTHREAD_MUTEX_INITIALIZER;
    if (memory == NULL) {
        pthread_mutex_lock(&ends);
        char text[120];
        snprintf(text, sizeof text, "no memory for %zu times %zu bytes; a smaller task may have it",
                 count, size);
        if (command_no_memory != NULL) {
            command_no_memory(text);
        } else {
            fprintf(stderr, "%s: %s\n", program_invocation_short_name, text);
        }
        exit(EXIT_FAILURE);
    }
    return memory;
}

void *command_calloc(size_t count, size_t size)
{
    return found(calloc(count + (count == 0), size), count, size);
}

void *command_realloc(void *memory, size_t count, size_t size)
{
    return found(reallocarray(memory, count + (count == 0), size), count, size);
}

int command_end(const char *tool, int code)
{
    errno = 0;
    const bool failed = fflush(stdout) != 0, before = ferror(stdout) != 0;
    if (!failed && !before) {
        return code;
    }
    fprintf(stderr, "%s: output: %s\n", tool, errno != 0 ? strerror(errno) : "was not written");
    return code != EXIT_SUCCESS ? code : EXIT_FAILURE;
}
