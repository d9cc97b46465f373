/* SPDX-License-Identifier: Apache-2.0 */
#include "tune.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/cache_lines.h"

static const char *const phase_names[] = {"prefill", "decode"};

bool tune_takes(enum shape_kind_code kind)
{
    return kind != SHAPE_MIXED && kind != SHAPE_WRITE && kind != SHAPE_MERGE &&
           kind != SHAPE_DISPATCH;
}

static attn_status fail(struct attn_error *error, const char *what, const char *why)
{
    snprintf(error->field, sizeof error->field, "%.60s", what);
    snprintf(error->message, sizeof error->message, "%s", why);
    return error->status = ATTN_ERROR_IO;
}

static bool usable(const struct result *result)
{
    return result->error[0] == '\0' && !result->timing.failed && result->rank_shape[0] != '\0';
}

/* The key of a line: all but the time. */
static void key_of(const struct result *result, const struct session *session, char *key,
                   size_t size)
{
    snprintf(key, size, "%s %s %s %s ", session->device_arch, result->rank_shape,
             phase_names[result->phase], result->backend);
}

/* Several lengths of one layer give one line: the geometric mean, to which each counts alike. */
static void write_line(const struct report *report, const struct session *session, int32_t index,
                       FILE *file)
{
    char key[512], other[512];
    double sum = 0;
    int32_t count = 0;
    key_of(&report->results[index], session, key, sizeof key);
    for (int32_t i = 0; i < report->count; i++) {
        if (!usable(&report->results[i])) {
            continue;
        }
        key_of(&report->results[i], session, other, sizeof other);
        if (strcmp(key, other) == 0) {
            if (i < index) {
                return; /* written with the first of them */
            }
            sum += log(report->results[i].timing.time_us);
            count++;
        }
    }
    fprintf(file, "%s%.6g\n", key, exp(sum / count));
}

/* Measurements and where they were made. */
struct measured {
    const struct report *report;
    const struct session *session;
};

static bool is_replaced(const void *user, const char *line)
{
    const struct measured *m = user;
    char key[512];
    for (int32_t i = 0; i < m->report->count; i++) {
        if (usable(&m->report->results[i])) {
            key_of(&m->report->results[i], m->session, key, sizeof key);
            if (strncmp(line, key, strlen(key)) == 0) {
                return true;
            }
        }
    }
    return false;
}

attn_status tune_write(const struct report *report, const struct session *session, char *path,
                       size_t size, struct attn_error *error)
{
    const struct measured measured = {report, session};
    int32_t count = 0;
    char *text = NULL;
    size_t length = 0;
    for (int32_t i = 0; i < report->count; i++) {
        count += usable(&report->results[i]);
    }
    if (count == 0) {
        return fail(error, "--tune", "no backend was measured; the ranks stay as they were");
    }
    attn_status status = cache_lines_path("ranks", path, size, error);
    FILE *out = status == ATTN_OK ? open_memstream(&text, &length) : NULL;
    if (out == NULL) {
        return status ? status : fail(error, path, strerror(errno));
    }
    for (int32_t i = 0; i < report->count; i++) {
        if (usable(&report->results[i])) {
            write_line(report, session, i, out);
        }
    }
    status = fclose(out) != 0
                 ? fail(error, path, "no memory")
                 : cache_lines_write("attn-bench", path, text, is_replaced, &measured, error);
    free(text);
    return status;
}
