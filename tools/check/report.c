/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

/* What was declared, by the names of the masks: what the suite then tested. */
static cJSON *features_json(const struct attn_backend_caps *caps)
{
    static const struct {
        const char *name;
        uint64_t bit;
    } terms[] = {
        {"causal", ATTN_TERM_CAUSAL},
        {"bidirectional", ATTN_TERM_BIDIRECTIONAL},
        {"causal_per_request", ATTN_TERM_CAUSAL_PER_REQUEST},
        {"sliding_window", ATTN_TERM_SLIDING_WINDOW},
        {"symmetric_window", ATTN_TERM_SYMMETRIC_WINDOW},
        {"chunked_local", ATTN_TERM_CHUNKED_LOCAL},
        {"soft_cap", ATTN_TERM_SOFT_CAP},
        {"alibi", ATTN_TERM_ALIBI},
        {"alibi_sqrt", ATTN_TERM_ALIBI_SQRT},
        {"sinks", ATTN_TERM_SINKS},
        {"static_sink", ATTN_TERM_STATIC_SINK},
        {"prefix_lm", ATTN_TERM_PREFIX_LM},
        {"tree_bits", ATTN_TERM_TREE_BITS},
        {"tree_bias", ATTN_TERM_TREE_BIAS},
    };
    cJSON *features = cJSON_CreateObject();
    for (size_t i = 0; i < sizeof terms / sizeof *terms; i++) {
        cJSON_AddBoolToObject(features, terms[i].name, (caps->terms & terms[i].bit) != 0);
    }
    cJSON_AddBoolToObject(features, "paged_kv", (caps->features & ATTN_FEATURE_PAGED_KV) != 0);
    cJSON_AddBoolToObject(features, "contiguous_kv",
                          (caps->features & ATTN_FEATURE_CONTIGUOUS_KV) != 0);
    cJSON_AddBoolToObject(features, "lse", (caps->features & ATTN_FEATURE_LSE) != 0);
    cJSON_AddBoolToObject(features, "batch_invariant",
                          (caps->features & ATTN_FEATURE_BATCH_INVARIANT) != 0);
    cJSON_AddNumberToObject(features, "graph_level", caps->graph_level);
    return features;
}

bool report_json(const struct report *report, const struct attn_backend_caps *caps)
{
    cJSON *root = cJSON_CreateObject();
    cJSON *failures = cJSON_CreateArray();
    cJSON_AddStringToObject(root, "backend", report->backend);
    cJSON_AddNumberToObject(root, "passed", report->counts[TRIAL_PASSED]);
    cJSON_AddNumberToObject(root, "failed", report->counts[TRIAL_FAILED]);
    cJSON_AddNumberToObject(root, "skipped", report->counts[TRIAL_SKIPPED]);
    cJSON_AddItemToObject(root, "features", features_json(caps));
    cJSON_AddItemToObject(root, "failures", failures);
    for (int32_t i = 0; i < report->num_lines; i++) {
        const struct report_line *line = &report->lines[i];
        if (line->result == TRIAL_FAILED) {
            char repeat[1024];
            cJSON *failure = cJSON_CreateObject();
            snprintf(repeat, sizeof repeat, "attn-check %s --full --seed %llu --filter '%s'",
                     report->target, (unsigned long long)report->seed, line->name);
            cJSON_AddStringToObject(failure, "case", line->name);
            cJSON_AddStringToObject(failure, "message", line->message ? line->message : "");
            cJSON_AddStringToObject(failure, "repeat", repeat);
            cJSON_AddItemToArray(failures, failure);
        }
    }
    char *text = cJSON_Print(root);
    cJSON_Delete(root);
    if (text == NULL) {
        return false;
    }
    puts(text);
    cJSON_free(text);
    return true;
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
        fputs(line->result == TRIAL_FAILED ? "\"><failure message=\"" : "\"><skipped message=\"", out);
        put_xml(out, line->message ? line->message : "");
        fputs("\"/></testcase>\n", out);
    }
    fputs("</testsuite>\n", out);
    return fclose(out) == 0;
}
