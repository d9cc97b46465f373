/* SPDX-License-Identifier: Apache-2.0 */
#include "plot.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Where a kernel that computes next to nothing is drawn: as far under the roof as its bytes are. */
#define LEAST_PER_BYTE 0.2
#define MAX_SERIES (SHAPE_KIND_COUNT * MAX_BACKENDS)

static attn_status fail(struct attn_error *error, const char *field, const char *what)
{
    snprintf(error->field, sizeof error->field, "%s", field);
    snprintf(error->message, sizeof error->message, "%s", what);
    return error->status = ATTN_ERROR_NOT_FOUND;
}

bool plot_possible(const char *path, struct attn_error *error)
{
    if (system("command -v gnuplot >/dev/null 2>&1") != 0) {
        fail(error, "gnuplot", "is not installed; --plot needs it (Debian: gnuplot-nox)");
        return false;
    }
    FILE *file = fopen(path, "ab"); /* before anything is measured */
    if (file == NULL) {
        fail(error, path, strerror(errno));
        return false;
    }
    fclose(file);
    return true;
}

/* A string of gnuplot's in single quotes, in which only those are special. */
static void put_quoted(FILE *pipe, const char *text)
{
    fputc('\'', pipe);
    for (; *text != '\0'; text++) {
        fputs(*text == '\'' ? "''" : (char[]){*text, '\0'}, pipe);
    }
    fputc('\'', pipe);
}

/* Draws $data (operations per byte, TFLOP/s, length, time, floor), which has `count` data sets with
 * their titles, under ceilings `read` and `peak`. */
static const char script[] =
    "set termoption noenhanced\nset key below samplen 2 height 1\nset grid\n"
    "set colorsequence podo\nset format '%g'\nset rmargin 5\nset multiplot layout 1,2\n"
    "roof(x) = x * read < peak ? x * read : peak\n"
    "set title 'Roofline (left of 1/4: what moves bytes and computes nothing)'\n"
    "set xlabel 'operations per byte'\nset ylabel 'TFLOP/s'\n"
    "set logscale xy\n"
    "plot [0.1:10000] roof(x) with lines lc 'black' lw 2 "
    "title sprintf('ceilings: %.4g GB/s, %.3g TFLOP/s', 1e3 * read, peak), "
    "for [i=1:count] $data index i-1 using 1:2 with points lc i pt 7 title titles[i]\n"
    "set title 'Time over length (dashed: floor)'\nset xlabel 'keys, or rows'\n"
    "set ylabel 'microseconds'\nset autoscale\n"
    "plot for [i=1:count] $data index i-1 using 3:4 smooth unique with linespoints lc i pt 7 "
    "title titles[i], "
    "for [i=1:count] $data index i-1 using 3:5 smooth unique with lines lc i dt 2 notitle\n"
    "unset multiplot\n";

static bool drawn(const struct result *result)
{
    return result->error[0] == '\0' && !result->timing.failed &&
           result->shape.kind != SHAPE_DISPATCH;
}

/* Results of one shape's kind on one backend are one series. */
static bool same_series(const struct result *a, const struct result *b)
{
    return drawn(a) && drawn(b) && a->shape.kind == b->shape.kind &&
           strcmp(a->backend, b->backend) == 0;
}

/* The keys of a request, or the rows of a shape without any. */
static double length_of(const struct shape *shape)
{
    double l = shape->value[PARAMETER_L];
    return l > 0 ? l : shape->value[PARAMETER_S];
}

/* $data and, behind it, the titles; returns how many series there are. */
static int32_t put_data(FILE *pipe, const struct report *report)
{
    const struct result *all = report->results, *of_series[MAX_SERIES];
    int32_t count = 0;
    fputs("$data << EOD\n", pipe);
    for (int32_t i = 0; i < report->count && count < MAX_SERIES; i++) {
        bool begins = drawn(&all[i]);
        for (int32_t j = 0; j < i && begins; j++) {
            begins = !same_series(&all[j], &all[i]);
        }
        for (int32_t j = i; j < report->count && begins; j++) {
            const struct timing *t = &all[j].timing;
            if (same_series(&all[j], &all[i])) {
                const double per_byte = t->gb_s > 0 ? 1e3 * t->tflop_s / t->gb_s : 0;
                const double at = per_byte > LEAST_PER_BYTE ? per_byte : LEAST_PER_BYTE;
                fprintf(pipe, "%.9g %.9g %.9g %.9g %.9g\n", at,
                        per_byte > LEAST_PER_BYTE ? t->tflop_s : 1e-3 * at * t->gb_s,
                        length_of(&all[j].shape), t->time_us, t->floor_us);
            }
        }
        if (begins) {
            of_series[count++] = &all[i];
            fputs("\n\n", pipe);
        }
    }
    fprintf(pipe, "EOD\ncount = %d\narray titles[%d]\n", count, MAX_SERIES);
    for (int32_t i = 0; i < count; i++) {
        char title[224];
        snprintf(title, sizeof title, "%s, %s", shape_name(&of_series[i]->shape),
                 of_series[i]->backend);
        fprintf(pipe, "titles[%d] = ", i + 1);
        put_quoted(pipe, title);
        fputc('\n', pipe);
    }
    return count;
}

/* gnuplot, which reads what to draw on its standard input and draws on its standard output, `file`:
 * it is given no name, of which it would run some as commands. */
static FILE *start_gnuplot(int file, pid_t *process)
{
    extern char **environ;
    char *arguments[] = {"gnuplot", NULL};
    int ends[2] = {-1, -1};
    FILE *pipe = NULL;
    posix_spawn_file_actions_t actions;
    if (file < 0 || pipe2(ends, O_CLOEXEC) != 0 || posix_spawn_file_actions_init(&actions) != 0) {
        goto done;
    }
    if (posix_spawn_file_actions_adddup2(&actions, ends[0], STDIN_FILENO) == 0 &&
        posix_spawn_file_actions_adddup2(&actions, file, STDOUT_FILENO) == 0 &&
        posix_spawnp(process, "gnuplot", &actions, NULL, arguments, environ) == 0) {
        pipe = fdopen(ends[1], "w");
    }
    posix_spawn_file_actions_destroy(&actions);
done:
    if (ends[0] >= 0) {
        close(ends[0]);
    }
    if (pipe == NULL && ends[1] >= 0) {
        close(ends[1]);
    }
    return pipe;
}

attn_status plot_write(const struct report *report, const struct session *session, const char *path,
                       struct attn_error *error)
{
    void (*before)(int) = signal(SIGPIPE, SIG_IGN); /* it may end early; its status tells */
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    pid_t process = -1;
    FILE *pipe = start_gnuplot(file, &process);
    int32_t count = 0;
    int status = -1;
    if (pipe != NULL) {
        bool svg = strcmp(path + strlen(path) - 4, ".svg") == 0;
        count = put_data(pipe, report);
        if (count > 0) {
            double f32 = ceilings_best(session->ceilings, CEILING_F32);
            double bf16 = ceilings_best(session->ceilings, CEILING_BF16);
            fprintf(pipe, "read = %.9g\npeak = %.9g\nset terminal %s size 1280,640\n%s",
                    1e-12 * ceilings_best(session->ceilings, CEILING_READ),
                    1e-12 * (bf16 > f32 ? bf16 : f32), svg ? "svg background 'white'" : "pngcairo",
                    script);
        }
        fclose(pipe);
    }
    while (process > 0 && waitpid(process, &status, 0) < 0 && errno == EINTR) {
    }
    signal(SIGPIPE, before);
    if (file < 0 || close(file) != 0) {
        return fail(error, path, strerror(errno));
    }
    if (pipe == NULL) {
        return fail(error, "gnuplot", "cannot be started");
    }
    if (count == 0) {
        return fail(error, "gnuplot", "nothing was measured that could be drawn");
    }
    return status == 0 ? ATTN_OK : fail(error, "gnuplot", "failed; what it said stands above");
}
