/* SPDX-License-Identifier: Apache-2.0 */
#include "plot.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static attn_status fail(struct attn_error *error, const char *what)
{
    snprintf(error->field, sizeof error->field, "gnuplot");
    snprintf(error->message, sizeof error->message, "%s", what);
    return error->status = ATTN_ERROR_NOT_FOUND;
}

bool plot_possible(struct attn_error *error)
{
    int status = system("command -v gnuplot >/dev/null 2>&1");
    if (status != 0) {
        fail(error, "is not installed; --plot needs it (Debian: gnuplot-nox)");
    }
    return status == 0;
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

static bool drawn(const struct result *result)
{
    return result->error[0] == '\0' && !result->timing.failed &&
           result->shape.kind != SHAPE_DISPATCH;
}

/* Results of one shape's kind on one backend are one series. */
static bool same_series(const struct result *a, const struct result *b)
{
    return a->shape.kind == b->shape.kind && strcmp(a->backend, b->backend) == 0;
}

static bool begins_series(const struct report *report, int32_t index)
{
    for (int32_t i = 0; i < index; i++) {
        if (drawn(&report->results[i]) &&
            same_series(&report->results[i], &report->results[index])) {
            return false;
        }
    }
    return drawn(&report->results[index]);
}

/* The keys of a request, or the rows of a shape without any. */
static double length_of(const struct shape *shape)
{
    double l = shape->value[PARAMETER_L];
    return l > 0 ? l : shape->value[PARAMETER_S];
}

/* Blocks $series0, $series1, …: operations per byte, TFLOP/s, length, time, floor. */
static int32_t put_data(FILE *pipe, const struct report *report)
{
    int32_t count = 0;
    for (int32_t i = 0; i < report->count; i++) {
        if (!begins_series(report, i)) {
            continue;
        }
        fprintf(pipe, "$series%d << EOD\n", count++);
        for (int32_t j = i; j < report->count; j++) {
            const struct result *result = &report->results[j];
            const struct timing *t = &result->timing;
            if (drawn(result) && same_series(result, &report->results[i])) {
                double intensity = t->gb_s > 0 ? 1e3 * t->tflop_s / t->gb_s : 0;
                fprintf(pipe, "%.9g %.9g %.9g %.9g %.9g\n", intensity, t->tflop_s,
                        length_of(&result->shape), t->time_us, t->floor_us);
            }
        }
        fputs("EOD\n", pipe);
    }
    return count;
}

static void put_title(FILE *pipe, const struct report *report, int32_t series)
{
    for (int32_t i = 0; i < report->count; i++) {
        if (begins_series(report, i) && series-- == 0) {
            char title[224];
            snprintf(title, sizeof title, "%s, %s", shape_name(&report->results[i].shape),
                     report->results[i].backend);
            put_quoted(pipe, title);
            return;
        }
    }
}

static void put_roofline(FILE *pipe, const struct report *report, const struct session *session,
                         int32_t num_series)
{
    double read = ceilings_best(session->ceilings, CEILING_READ);
    double f32 = ceilings_best(session->ceilings, CEILING_F32);
    double bf16 = ceilings_best(session->ceilings, CEILING_BF16);
    double peak = bf16 > f32 ? bf16 : f32;
    fputs("set title 'Roofline'\nset xlabel 'operations per byte'\nset ylabel 'TFLOP/s'\n"
          "set logscale xy\n",
          pipe);
    fprintf(pipe, "roof(x) = x * %.9g < %.9g ? x * %.9g : %.9g\n", 1e-12 * read, 1e-12 * peak,
            1e-12 * read, 1e-12 * peak);
    fputs("plot [0.1:10000] roof(x) with lines lc 'black' lw 2 title 'ceilings of the same run'",
          pipe);
    for (int32_t i = 0; i < num_series; i++) {
        fprintf(pipe, ", $series%d using 1:2 with points lc %d pt 7 title ", i, i + 1);
        put_title(pipe, report, i);
    }
    fputc('\n', pipe);
}

static void put_lengths(FILE *pipe, const struct report *report, int32_t num_series)
{
    fputs("set title 'Time over length (dashed: floor)'\nset xlabel 'keys, or rows'\n"
          "set ylabel 'microseconds'\nset autoscale\nplot ",
          pipe);
    for (int32_t i = 0; i < num_series; i++) {
        fprintf(pipe, "%s$series%d using 3:4 smooth unique with linespoints lc %d pt 7 title ",
                i ? ", " : "", i, i + 1);
        put_title(pipe, report, i);
        fprintf(pipe, ", $series%d using 3:5 smooth unique with lines lc %d dt 2 notitle", i,
                i + 1);
    }
    fputc('\n', pipe);
}

attn_status plot_write(const struct report *report, const struct session *session, const char *path,
                       struct attn_error *error)
{
    void (*before)(int) = signal(SIGPIPE, SIG_IGN); /* it may end early; its status tells */
    FILE *pipe = popen("gnuplot", "w");
    if (pipe == NULL) {
        return fail(error, "cannot be started");
    }
    bool svg = strcmp(path + strlen(path) - 4, ".svg") == 0;
    fprintf(pipe, "set terminal %s size 1280,560\nset output ",
            svg ? "svg background 'white'" : "pngcairo");
    put_quoted(pipe, path);
    fputs("\nset termoption noenhanced\nset key below\nset grid\n", pipe);
    int32_t num_series = put_data(pipe, report);
    if (num_series > 0) {
        fputs("set multiplot layout 1,2\n", pipe);
        put_roofline(pipe, report, session, num_series);
        put_lengths(pipe, report, num_series);
        fputs("unset multiplot\n", pipe);
    }
    int status = pclose(pipe);
    signal(SIGPIPE, before);
    if (num_series == 0) {
        return fail(error, "nothing was measured that could be drawn");
    }
    return status == 0 ? ATTN_OK : fail(error, "failed; what it said stands above");
}
