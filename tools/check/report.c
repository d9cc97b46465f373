/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "declared.h"

void report_finish(struct report *report)
{
    for (int32_t i = 0; i < report->num_lines; i++) {
        free(report->lines[i].name);
        free(report->lines[i].message);
    }
    free(report->lines);
    report->lines = NULL;
    report->num_lines = 0;
}

void report_add(struct report *report, const char *name, enum trial_result result,
                const char *message)
{
    struct report_line *lines =
        realloc(report->lines, sizeof *lines * (size_t)(report->num_lines + 1));
    report->counts[result]++;
    if (lines == NULL) {
        report->failed = true;
        return;
    }
    report->lines = lines;
    struct report_line *line = &lines[report->num_lines++];
    *line = (struct report_line){strdup(name), NULL, result};
    if (result != TRIAL_PASSED) {
        line->message = strdup(message);
    }
}

/* Cases by what their names begin with: "attend", "engine", "merge_states", … */
static void add_counts(struct json *root, const struct report *report)
{
    struct json *kinds = json_add(root, "cases", json_object());
    for (int32_t i = 0; i < report->num_lines && kinds != NULL; i++) {
        const char *name = report->lines[i].name;
        char kind[64];
        snprintf(kind, sizeof kind, "%.*s", (int)strcspn(name, "."), name);
        struct json *count = json_get(kinds, kind);
        if (count == NULL) {
            count = json_add(kinds, kind, json_number(0));
        }
        if (count != NULL) {
            count->number++;
        }
    }
}

bool report_json(const struct report *report, const struct attn_backend_caps *caps)
{
    struct json *root = json_object();
    json_add(root, "backend", json_string(report->backend));
    json_add(root, "passed", json_number(report->counts[TRIAL_PASSED]));
    json_add(root, "failed", json_number(report->counts[TRIAL_FAILED]));
    json_add(root, "skipped", json_number(report->counts[TRIAL_SKIPPED]));
    json_add(root, "features", declared_json(caps));
    add_counts(root, report);
    struct json *failures = json_add(root, "failures", json_array());
    for (int32_t i = 0; i < report->num_lines; i++) {
        const struct report_line *line = &report->lines[i];
        if (line->result == TRIAL_FAILED) {
            char repeat[1024];
            struct json *failure = json_object();
            snprintf(repeat, sizeof repeat, "attn-check %s --full --seed %llu --filter '%s'",
                     report->target, (unsigned long long)report->seed, line->name);
            json_add(failure, "case", json_string(line->name));
            json_add(failure, "message", json_string(line->message ? line->message : ""));
            json_add(failure, "repeat", json_string(repeat));
            json_push(failures, failure);
        }
    }
    bool printed = json_print(root);
    json_destroy(root);
    return printed;
}

void report_text(const struct report *report)
{
    for (int32_t i = 0; i < report->num_lines; i++) {
        if (report->lines[i].result == TRIAL_FAILED) {
            printf("FAILED %s\n       %s\n", report->lines[i].name,
                   report->lines[i].message ? report->lines[i].message : "");
        }
    }
    printf("%s: %d passed, %d failed, %d skipped (seed %llu)\n", report->backend,
           report->counts[TRIAL_PASSED], report->counts[TRIAL_FAILED],
           report->counts[TRIAL_SKIPPED], (unsigned long long)report->seed);
}

static void put_xml(FILE *out, const char *text)
{
    for (; *text != '\0'; text++) {
        switch (*text) {
        case '&':
            fputs("&amp;", out);
            break;
        case '<':
            fputs("&lt;", out);
            break;
        case '"':
            fputs("&quot;", out);
            break;
        default:
            fputc(*text, out);
        }
    }
}

bool report_junit(const struct report *report, const char *file)
{
    FILE *out = fopen(file, "w");
    if (out == NULL) {
        return false;
    }
    fprintf(out, "<?xml version=\"1.0\"?>\n<testsuite name=\"");
    put_xml(out, report->backend);
    fprintf(out, "\" tests=\"%d\" failures=\"%d\" skipped=\"%d\">\n", report->num_lines,
            report->counts[TRIAL_FAILED], report->counts[TRIAL_SKIPPED]);
    for (int32_t i = 0; i < report->num_lines; i++) {
        const struct report_line *line = &report->lines[i];
        fputs("  <testcase name=\"", out);
        put_xml(out, line->name);
        if (line->result == TRIAL_PASSED) {
            fputs("\"/>\n", out);
            continue;
        }
        fputs(line->result == TRIAL_FAILED ? "\"><failure message=\"" : "\"><skipped message=\"",
              out);
        put_xml(out, line->message ? line->message : "");
        fputs("\"/></testcase>\n", out);
    }
    fputs("</testsuite>\n", out);
    return fclose(out) == 0;
}
