/* SPDX-License-Identifier: Apache-2.0 */
/* attn-bench: how fast a backend is, beside what the machine can do, through the public ABI. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dispatch.h"
#include "merge.h"
#include "report.h"
#include "subject.h"

static int fail_with(const char *what, const struct attn_error *error)
{
    fprintf(stderr, "attn-bench: %s: %s%s%s\n", what, error->field,
            error->field[0] != '\0' ? ": " : "", error->message);
    return error->status == ATTN_ERROR_ABSENT ? EXIT_ABSENT : EXIT_FAILURE;
}

static void tell_progress(const struct options *options, int32_t done, const struct shape *shape)
{
    char text[256];
    if (isatty(STDERR_FILENO)) {
        shape_text(shape, text, sizeof text);
        fprintf(stderr, "\r\033[K%d of %d: %s", done + 1, options->shapes.count, text);
    }
}

static void keep_error(struct result *result, attn_status status, const struct session *session,
                       const struct attn_error *error)
{
    if (status != ATTN_OK) {
        snprintf(result->error, sizeof result->error, "%s%s%s", error->field,
                 error->field[0] != '\0' ? ": " : "",
                 error->message[0] != '\0' ? error->message : session->api->status_text(status));
    }
}

static void measure_subject(struct result *result, struct session *session, const char *backend)
{
    struct attn_error error = ATTN_ERROR_INIT;
    struct subject subject;
    result->reasons = cJSON_CreateArray();
    attn_status status =
        subject_init(&subject, session, &result->shape, backend, result->reasons, &error);
    if (status == ATTN_OK) {
        memcpy(result->backend, subject.backend, sizeof result->backend);
        result->phase = subject.phase;
        result->kv_dtype = subject.choice.kv_dtype;
        status = timing_measure(&result->timing, session, &subject.work, &error);
        subject_finish(&subject);
    }
    keep_error(result, status, session, &error);
}

static void measure(struct report *report, struct session *session, const struct shape *shape,
                    const char *backend)
{
    struct result result = {.shape = *shape, .kv_dtype = session->options->kv_dtype};
    if (backend != NULL) {
        snprintf(result.backend, sizeof result.backend, "%s", backend);
    }
    struct attn_error error = ATTN_ERROR_INIT;
    switch (shape->kind) {
    case SHAPE_MERGE:
        keep_error(&result, merge_measure(&result, session, backend, &error), session, &error);
        break;
    case SHAPE_DISPATCH:
        keep_error(&result, dispatch_measure(&result, session, backend, &error), session, &error);
        break;
    default:
        measure_subject(&result, session, backend);
        break;
    }
    report_add(report, &result);
}

static int show(const struct report *report, const struct session *session)
{
    const struct options *options = session->options;
    bool shown = true;
    if (isatty(STDERR_FILENO)) {
        fputs("\r\033[K", stderr);
    }
    if (options->json) {
        shown = report_json(report, session);
    } else if (options->csv) {
        report_csv(report, session);
    } else {
        report_text(report, session);
    }
    for (int32_t i = 0; i < report->count; i++) {
        const struct result *result = &report->results[i];
        char text[256];
        shape_text(&result->shape, text, sizeof text);
        if (result->error[0] != '\0') {
            fprintf(stderr, "attn-bench: %s: %s\n", text, result->error);
        } else if (result->timing.failed) {
            fprintf(stderr,
                    "attn-bench: %s: measured under its floor (ratio %.3f): the ceilings or the "
                    "time were disturbed\n",
                    text, result->timing.ratio_to_floor);
        }
    }
    return shown && report_all_good(report) ? EXIT_SUCCESS : EXIT_FAILURE;
}

int main(int argc, char **argv)
{
    struct options options;
    struct session session;
    struct report report = {NULL, 0, false};
    struct attn_error error = ATTN_ERROR_INIT;
    int code = options_parse(argc, argv, &options);
    if (code < 0 && options.child != NULL) {
        code = dispatch_child(&options);
    }
    if (code < 0) {
        code = session_init(&session, &options, NULL, true, &error) == ATTN_OK
                   ? EXIT_SUCCESS
                   : fail_with(options.backend != NULL ? options.backend : "runtime", &error);
        if (code == EXIT_SUCCESS) {
            for (int32_t i = 0; i < options.shapes.count; i++) {
                tell_progress(&options, i, &options.shapes.shapes[i]);
                measure(&report, &session, &options.shapes.shapes[i], options.backend);
            }
            code = show(&report, &session);
            report_finish(&report);
            session_finish(&session);
        }
    }
    options_finish(&options);
    return code;
}
