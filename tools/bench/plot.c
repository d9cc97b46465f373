/* SPDX-License-Identifier: Apache-2.0 */
/* A roofline and a curve over the length, drawn by gnuplot, which gets commands and data through a
 * pipe. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "report.h"

/* A kernel that computes almost nothing is drawn here, as far under the roof as its bytes are. */
#define LEAST_PER_BYTE 0.2
#define MAX_SERIES (SHAPE_KIND_COUNT * MAX_BACKENDS)

bool plot_possible(const char *path, struct attn_error *error)
{
    if (system("command -v gnuplot >/dev/null 2>&1") != 0) {
        command_error(error, ATTN_ERROR_NOT_FOUND, "gnuplot",
                      "is not installed; --plot needs it (Debian: gnuplot-nox)");
        return false;
    }
    FILE *file = fopen(path, "ab"); /* before anything is measured */
    if (file == NULL) {
        command_error(error, ATTN_ERROR_NOT_FOUND, path, "%s", strerror(errno));
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
static double length_of(const struct bench_shape *shape)
{
    double l = shape->value[PARAMETER_L];
    return l > 0 ? l : shape->value[PARAMETER_S];
}

/* Writes $data and the titles; returns how many series there are. */
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

attn_status plot_write(const struct report *report, const struct session *session, const char *path,
                       struct attn_error *error)
{
    const bool svg = strcmp(path + strlen(path) - 4, ".svg") == 0;
    void (*before)(int) = signal(SIGPIPE, SIG_IGN); /* it may end early; its status tells */
    /* The shell opens the file: gnuplot would run some names as commands. */
    FILE *pipe = setenv("ATTN_BENCH_PLOT", path, 1) == 0
                     ? popen("exec gnuplot >\"$ATTN_BENCH_PLOT\"", "w")
                     : NULL;
    const int32_t count = pipe != NULL && session->ceilings != NULL ? put_data(pipe, report) : 0;
    if (count > 0) {
        const double f32 = session->ceilings->best[CEILING_F32];
        const double bf16 = session->ceilings->best[CEILING_BF16];
        fprintf(pipe, "read = %.9g\npeak = %.9g\nset terminal %s size 1280,640\n%s",
                1e-12 * session->ceilings->best[CEILING_READ], 1e-12 * (bf16 > f32 ? bf16 : f32),
                svg ? "svg background 'white'" : "pngcairo", script);
    }
    const int status = pipe != NULL ? pclose(pipe) : -1;
    signal(SIGPIPE, before);
    return count > 0 && status == 0
               ? ATTN_OK
               : command_error(error, ATTN_ERROR_NOT_FOUND, "gnuplot", "%s",
                               pipe == NULL ? "cannot be started"
                               : count == 0 ? "nothing was measured that could be drawn"
                                            : "failed; what it said stands above");
}
