/* SPDX-License-Identifier: Apache-2.0 */
#include "tune.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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

/* As the core finds it: ATTN_CACHE_DIR, else the user's cache directory. */
static bool cache_folder(char *folder, size_t size)
{
    const char *own = secure_getenv("ATTN_CACHE_DIR"), *xdg = secure_getenv("XDG_CACHE_HOME");
    const char *home = secure_getenv("HOME");
    if (own != NULL && own[0] != '\0') {
        return (size_t)snprintf(folder, size, "%s", own) < size;
    }
    if (xdg != NULL && xdg[0] == '/') {
        return (size_t)snprintf(folder, size, "%s/libattn", xdg) < size;
    }
    return home != NULL && home[0] == '/' &&
           (size_t)snprintf(folder, size, "%s/.cache/libattn", home) < size;
}

static bool make_folder(char *folder)
{
    for (char *slash = strchr(folder + 1, '/');; slash = strchr(slash + 1, '/')) {
        if (slash != NULL) {
            *slash = '\0';
        }
        bool made = mkdir(folder, 0777) == 0 || errno == EEXIST;
        if (slash == NULL) {
            return made;
        }
        *slash = '/';
    }
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
static bool write_line(const struct report *report, const struct session *session, int32_t index,
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
                return true; /* written with the first of them */
            }
            sum += log(report->results[i].timing.time_us);
            count++;
        }
    }
    return fprintf(file, "%s%.6g\n", key, exp(sum / count)) > 0;
}

static bool is_replaced(const struct report *report, const struct session *session,
                        const char *line)
{
    char key[512];
    for (int32_t i = 0; i < report->count; i++) {
        if (usable(&report->results[i])) {
            key_of(&report->results[i], session, key, sizeof key);
            if (strncmp(line, key, strlen(key)) == 0) {
                return true;
            }
        }
    }
    return false;
}

/* What stood in the file and is not measured anew. */
static bool keep_lines(const struct report *report, const struct session *session, const char *path,
                       FILE *file)
{
    FILE *old = fopen(path, "r");
    char *line = NULL;
    size_t capacity = 0;
    bool ok = true;
    while (old != NULL && ok && getline(&line, &capacity, old) > 0) {
        ok = is_replaced(report, session, line) || fputs(line, file) >= 0;
    }
    free(line);
    if (old != NULL) {
        fclose(old);
    }
    return ok;
}

attn_status tune_write(const struct report *report, const struct session *session, char *path,
                       size_t size, struct attn_error *error)
{
    char folder[4000], temporary[4120];
    int32_t count = 0;
    for (int32_t i = 0; i < report->count; i++) {
        count += usable(&report->results[i]);
    }
    if (count == 0) {
        return fail(error, "--tune", "no backend was measured; the ranks stay as they were");
    }
    if (!cache_folder(folder, sizeof folder)) {
        return fail(error, "ATTN_CACHE_DIR", "there is no cache directory: it and HOME are unset");
    }
    snprintf(path, size, "%s/ranks", folder);
    snprintf(temporary, sizeof temporary, "%s/ranks.%ld", folder, (long)getpid());
    FILE *file = make_folder(folder) ? fopen(temporary, "w") : NULL;
    if (file == NULL) {
        return fail(error, folder, strerror(errno));
    }
    bool ok = keep_lines(report, session, path, file);
    for (int32_t i = 0; i < report->count && ok; i++) {
        ok = !usable(&report->results[i]) || write_line(report, session, i, file);
    }
    ok = fclose(file) == 0 && ok;
    if (!ok || rename(temporary, path) != 0) { /* readers see the old file or the new one */
        const char *why = strerror(errno);
        remove(temporary);
        return fail(error, path, why);
    }
    return ATTN_OK;
}
