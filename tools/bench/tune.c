/* SPDX-License-Identifier: Apache-2.0 */
#include "tune.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host/cache_file.h"

#define MAX_FILE ((size_t)1 << 20) /* of what the core reads */

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

/* As the core finds it: ATTN_CACHE_DIR, where empty means none, else the user's cache directory. */
static attn_status ranks_path(char *path, size_t size, struct attn_error *error)
{
    char folder[PATH_MAX];
    const char *own = secure_getenv("ATTN_CACHE_DIR"), *why = NULL;
    if (own != NULL && own[0] != '/') {
        return fail(error, "ATTN_CACHE_DIR",
                    own[0] == '\0' ? "is empty: there is no cache, and no place for ranks"
                                   : "is not an absolute path");
    }
    snprintf(folder, sizeof folder, "%s", own != NULL ? own : "");
    if (own == NULL) {
        cache_folder_default(folder, sizeof folder, secure_getenv("XDG_CACHE_HOME"),
                             secure_getenv("HOME"), &why);
    }
    if (folder[0] == '\0') {
        return fail(error, "ATTN_CACHE_DIR", why != NULL ? why : "it and HOME are unset");
    }
    return (size_t)snprintf(path, size, "%s/ranks", folder) < size
               ? ATTN_OK
               : fail(error, "ATTN_CACHE_DIR", "is too long");
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

/* What stood in the file and is not measured anew. A file that the core would not trust is not
 * carried on. */
static attn_status keep_lines(const struct report *report, const struct session *session,
                              const char *path, FILE *out, struct attn_error *error)
{
    struct cache_file file;
    const char *why = cache_file_open(&file, path, MAX_FILE);
    if (why != NULL) {
        fprintf(stderr, "attn-bench: %s %s; it is written anew\n", path, why);
    }
    if (why != NULL || file.descriptor < 0) {
        return ATTN_OK;
    }
    const size_t size = (size_t)file.info.st_size;
    char *content = malloc(size + 1);
    if (content == NULL || !cache_file_read(&file, content)) {
        cache_file_close(&file);
        free(content);
        return fail(error, path, "cannot be read");
    }
    content[size] = '\0';
    for (char *line = content, *next; *line != '\0'; line = next) {
        next = line + strcspn(line, "\n");
        if (*next != '\0') {
            *next++ = '\0';
        }
        if (!is_replaced(report, session, line)) {
            fprintf(out, "%s\n", line);
        }
    }
    free(content);
    return ATTN_OK;
}

attn_status tune_write(const struct report *report, const struct session *session, char *path,
                       size_t size, struct attn_error *error)
{
    int32_t count = 0;
    char *text = NULL;
    size_t length = 0;
    for (int32_t i = 0; i < report->count; i++) {
        count += usable(&report->results[i]);
    }
    if (count == 0) {
        return fail(error, "--tune", "no backend was measured; the ranks stay as they were");
    }
    attn_status status = ranks_path(path, size, error);
    FILE *out = status == ATTN_OK ? open_memstream(&text, &length) : NULL;
    if (out == NULL) {
        return status ? status : fail(error, path, strerror(errno));
    }
    status = keep_lines(report, session, path, out, error);
    for (int32_t i = 0; i < report->count && status == ATTN_OK; i++) {
        if (usable(&report->results[i])) {
            write_line(report, session, i, out);
        }
    }
    if (fclose(out) != 0) {
        status = fail(error, path, "no memory");
    } else if (status == ATTN_OK && length > MAX_FILE) {
        status = fail(error, path, "would be larger than 1 MiB, which is not read");
    } else if (status == ATTN_OK && !cache_file_write(path, text, length)) {
        status = fail(error, path, strerror(errno));
    }
    free(text);
    return status;
}
