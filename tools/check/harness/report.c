/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "common/json.h"

void report_finish(struct report *report)
{
    for (int32_t i = 0; i < report->num_lines; i++) {
        free(report->lines[i].name);
        free(report->lines[i].message);
    }
    free(report->lines);
    free(report->backend);
    free(report->features);
    free(report->record);
    if (report->junit_file != NULL) {
        fclose(report->junit_file);
    }
    report->junit_file = NULL;
    report->record = report->backend = report->features = NULL;
    report->lines = NULL;
    report->num_lines = 0;
}

static void put_xml(FILE *out, const char *text)
{
    static const char special[] = "&<\"";
    static const char *const names[] = {"&amp;", "&lt;", "&quot;"};
    for (; *text != '\0'; text++) {
        const char *found = strchr(special, *text);
        fprintf(out, "%s", found != NULL ? names[found - special] : (char[]){*text, '\0'});
    }
}

static void put_testcase(FILE *out, const struct report_line *line)
{
    fputs("  <testcase name=\"", out);
    put_xml(out, line->name);
    if (line->result == TRIAL_PASSED) {
        fputs("\"/>\n", out);
        return;
    }
    fputs(line->result == TRIAL_FAILED ? "\"><failure message=\"" : "\"><skipped message=\"", out);
    put_xml(out, line->message ? line->message : "");
    fputs("\"/></testcase>\n", out);
}

#define JUNIT_END "</testsuite>\n"

static const char *name_of(const struct report *report)
{
    return report->backend != NULL ? report->backend : report->target;
}

/* A document without cases; NULL: it cannot be written. */
static FILE *open_junit(const struct report *report, const char *counts)
{
    FILE *out = fopen(report->junit, "w");
    if (out != NULL) {
        fputs("<?xml version=\"1.0\"?>\n<testsuite name=\"", out);
        put_xml(out, name_of(report));
        fprintf(out, "\"%s>\n", counts);
    }
    return out;
}

/* Writes the document so far; the next case overwrites its end. */
static void add_to_junit(struct report *report, const struct report_line *line)
{
    if (report->junit == NULL) {
        return;
    }
    if (report->junit_file == NULL) {
        report->junit_file = open_junit(report, "");
    } else {
        fseek(report->junit_file, -(long)strlen(JUNIT_END), SEEK_CUR);
    }
    if (report->junit_file != NULL) { /* else report_junit reports it */
        put_testcase(report->junit_file, line);
        fputs(JUNIT_END, report->junit_file);
        fflush(report->junit_file);
    }
}

void report_add(struct report *report, const char *name, enum trial_result result,
                const char *message)
{
    report->lines =
        command_realloc(report->lines, (size_t)report->num_lines + 1, sizeof *report->lines);
    struct report_line *line = &report->lines[report->num_lines++];
    *line =
        (struct report_line){strdup(name), result != TRIAL_PASSED ? strdup(message) : NULL, result};
    report->counts[result]++;
    add_to_junit(report, line);
    if (report->progress) {
        fprintf(stderr, "\r%d cases, %d failed", report->num_lines, report->counts[TRIAL_FAILED]);
    }
}

void report_time(struct report *report, double us)
{
    if (report->num_lines > 0) {
        report->lines[report->num_lines - 1].us = us;
    }
}

void report_describe(struct report *report, const char *backend, const char *features)
{
    free(report->backend);
    free(report->features);
    report->backend = strdup(backend);
    report->features = strdup(features);
}

void report_record(struct report *report, const char *line)
{
    free(report->record);
    report->record = strdup(line);
}

/* Cases by what their names begin with: "attend", "engine", "merge_states", … */
static void add_counts(struct json *root, const struct report *report)
{
    struct json *kinds = json_add(root, "cases", json_object());
    for (int32_t i = 0; i < report->num_lines; i++) {
        const char *name = report->lines[i].name;
        char kind[64];
        snprintf(kind, sizeof kind, "%.*s", (int)strcspn(name, "."), name);
        struct json *count = json_get(kinds, kind);
        count = count != NULL ? count : json_add(kinds, kind, json_number(0));
        count->number++;
    }
}

static void repeat_command(const struct report *report, const struct report_line *line,
                           char *command, size_t size)
{
    snprintf(command, size, "attn-check %s --full --seed %llu --filter '%s'%s", report->target,
             (unsigned long long)report->seed, line->name, report->bench ? " --bench" : "");
}

void report_json(const struct report *report)
{
    struct json *root = json_object();
    json_add(root, "backend", json_string(name_of(report)));
    json_add(root, "version", json_string(ATTN_VERSION));
    json_add(root, "mode", json_string(report->full ? "full" : "quick"));
    json_add(root, "passed", json_number(report->counts[TRIAL_PASSED]));
    json_add(root, "failed", json_number(report->counts[TRIAL_FAILED]));
    json_add(root, "skipped", json_number(report->counts[TRIAL_SKIPPED]));
    json_add(root, "features",
             report->features != NULL ? json_raw(report->features) : json_object());
    add_counts(root, report);
    struct json *times = report->bench ? json_add(root, "times", json_array()) : NULL;
    for (int32_t i = 0; i < report->num_lines && times != NULL; i++) {
        if (report->lines[i].us > 0) {
            struct json *time = json_object();
            json_add(time, "case", json_string(report->lines[i].name));
            json_add(time, "time_us", json_number(report->lines[i].us));
            json_push(times, time);
        }
    }
    struct json *failures = json_add(root, "failures", json_array());
    for (int32_t i = 0; i < report->num_lines; i++) {
        const struct report_line *line = &report->lines[i];
        if (line->result == TRIAL_FAILED) {
            char repeat[1024];
            struct json *failure = json_object();
            repeat_command(report, line, repeat, sizeof repeat);
            json_add(failure, "case", json_string(line->name));
            json_add(failure, "message", json_string(line->message ? line->message : ""));
            json_add(failure, "repeat", json_string(repeat));
            json_push(failures, failure);
        }
    }
    json_print(root);
    json_destroy(root);
}

bool report_badge(const struct report *report, const char *file)
{
    struct json *root = json_object();
    char message[96];
    const int32_t passed = report->counts[TRIAL_PASSED], failed = report->counts[TRIAL_FAILED];
    const bool good = report_passed(report);
    snprintf(message, sizeof message, "%d of %d cases passed", passed, passed + failed);
    json_add(root, "schemaVersion", json_number(1));
    json_add(root, "label", json_string("libattn " ATTN_VERSION));
    json_add(root, "message", json_string(message));
    json_add(root, "color", json_string(good ? "brightgreen" : "red"));
    json_add(root, "isError", json_bool(!good));
    FILE *out = fopen(file, "w");
    bool written = out != NULL && json_write(out, root, 0) && fputc('\n', out) != EOF;
    written = out != NULL && fclose(out) == 0 && written;
    json_destroy(root);
    return written;
}

/* A part of a case's name, between dots and plus signs: a shape, a dtype, a term ... */
struct part {
    const char *text;
    size_t length; /* length of a term without its value */
    bool term;     /* after a plus sign */
};

static bool next_part(const char **at, struct part *part)
{
    bool term = **at == '+';
    *at += strspn(*at, ".+");
    size_t length = strcspn(*at, ".+");
    *part = (struct part){*at, term ? strcspn(*at, ".+0123456789") : length, term};
    *at += length;
    return length > 0;
}

/* The same part in the same place, or, a term, anywhere. */
static bool has_part(const char *name, const struct part *wanted, int32_t place)
{
    struct part part;
    for (int32_t i = 0; next_part(&name, &part); i++) {
        if ((wanted->term ? part.term : i == place) && part.length == wanted->length &&
            memcmp(part.text, wanted->text, part.length) == 0) {
            return true;
        }
    }
    return false;
}

static bool is_attend(const struct report_line *line)
{
    return strncmp(line->name, "attend.", 7) == 0 || strncmp(line->name, "engine.", 7) == 0;
}

/* What all failed attends have in common and not all others have: one line for each such part, with
 * how many others have it. Nothing for a single failure, whose name tells it all. */
static void print_common(const struct report *report)
{
    const struct report_line *first = NULL;
    int32_t failed = 0;
    for (int32_t i = 0; i < report->num_lines; i++) {
        const struct report_line *line = &report->lines[i];
        if (line->result == TRIAL_FAILED && is_attend(line)) {
            first = first != NULL ? first : line;
            failed++;
        }
    }
    if (failed < 2) {
        return;
    }
    const char *at = first->name;
    struct part part;
    for (int32_t place = 0; next_part(&at, &part); place++) {
        int32_t with = 0, others = 0, others_with = 0;
        for (int32_t i = 0; i < report->num_lines; i++) {
            const struct report_line *line = &report->lines[i];
            if (is_attend(line)) {
                bool has = has_part(line->name, &part, place);
                bool fails = line->result == TRIAL_FAILED;
                with += has && fails;
                others += !fails;
                others_with += has && !fails;
            }
        }
        if (with == failed && others_with < others) {
            printf("all %d failed attends have %.*s, as %d of the %d others\n", failed,
                   (int)part.length, part.text, others_with, others);
        }
    }
}

/* Each reason once, with how many cases it kept from running. */
static void print_skipped(const struct report *report)
{
    for (int32_t i = 0; i < report->num_lines; i++) {
        const struct report_line *line = &report->lines[i];
        int32_t same = 0;
        bool seen = line->result != TRIAL_SKIPPED || line->message == NULL;
        for (int32_t j = 0; j < report->num_lines && !seen; j++) {
            const struct report_line *other = &report->lines[j];
            bool equal = other->result == TRIAL_SKIPPED && other->message != NULL &&
                         strcmp(other->message, line->message) == 0;
            seen = equal && j < i;
            same += equal;
        }
        if (!seen) {
            printf("skipped %d (%s%s): %s\n", same, line->name, same > 1 ? ", ..." : "",
                   line->message);
        }
    }
}

void report_text(const struct report *report)
{
    const struct report_line *first = NULL;
    for (int32_t i = 0; i < report->num_lines; i++) {
        const struct report_line *line = &report->lines[i];
        if (line->us > 0) {
            printf("%12.2f us  %s\n", line->us, line->name);
        }
        if (line->result == TRIAL_FAILED) {
            printf("FAILED %s\n       %s\n", line->name, line->message ? line->message : "");
            first = first != NULL ? first : line;
        }
    }
    print_common(report);
    print_skipped(report);
    if (first != NULL) {
        char repeat[1024];
        repeat_command(report, first, repeat, sizeof repeat);
        printf("the first in a debugger: gdb --args %s\n", repeat);
    }
    printf("%s: %d passed, %d failed, %d skipped (seed %llu)\n", name_of(report),
           report->counts[TRIAL_PASSED], report->counts[TRIAL_FAILED],
           report->counts[TRIAL_SKIPPED], (unsigned long long)report->seed);
}

bool report_junit(struct report *report)
{
    if (report->junit_file != NULL) {
        fclose(report->junit_file);
        report->junit_file = NULL;
    }
    char counts[96];
    snprintf(counts, sizeof counts, " tests=\"%d\" failures=\"%d\" skipped=\"%d\"",
             report->num_lines, report->counts[TRIAL_FAILED], report->counts[TRIAL_SKIPPED]);
    FILE *out = open_junit(report, counts);
    if (out == NULL) {
        return false;
    }
    for (int32_t i = 0; i < report->num_lines; i++) {
        put_testcase(out, &report->lines[i]);
    }
    fputs(JUNIT_END, out);
    const bool written = !ferror(out);
    return fclose(out) == 0 && written;
}
