/* SPDX-License-Identifier: Apache-2.0 */
#include "common/cache_lines.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "host/cache_file.h"

#define MAX_FILE ((size_t)1 << 20) /* the core reads no more */

attn_status cache_lines_fail(struct attn_error *error, const char *what, const char *why)
{
    return command_error(error, ATTN_ERROR_IO, what, "%s", why);
}

attn_status cache_lines_path(const char *name, char *path, size_t size, struct attn_error *error)
{
    char folder[PATH_MAX], none[64];
    const char *own = secure_getenv("ATTN_CACHE_DIR"), *why = NULL;
    if (own != NULL && own[0] != '/') {
        snprintf(none, sizeof none, "is empty: there is no cache, and no place for %s", name);
        return cache_lines_fail(error, "ATTN_CACHE_DIR",
                                own[0] == '\0' ? none : "is not an absolute path");
    }
    snprintf(folder, sizeof folder, "%s", own != NULL ? own : "");
    if (own == NULL) {
        cache_folder_default(folder, sizeof folder, secure_getenv("XDG_CACHE_HOME"),
                             secure_getenv("HOME"), &why);
    }
    if (folder[0] == '\0') {
        return cache_lines_fail(error, "ATTN_CACHE_DIR",
                                why != NULL ? why : "it and HOME are unset");
    }
    return (size_t)snprintf(path, size, "%s/%s", folder, name) < size
               ? ATTN_OK
               : cache_lines_fail(error, "ATTN_CACHE_DIR", "is too long");
}

char *cache_lines_read(const char *path, const char **why)
{
    struct cache_file file;
    *why = cache_file_open(&file, path, MAX_FILE);
    if (*why != NULL || file.descriptor < 0) {
        return NULL;
    }
    char *content = command_calloc(1, (size_t)file.info.st_size + 1);
    if (cache_file_read(&file, content)) {
        return content;
    }
    *why = "cannot be read";
    free(content);
    return NULL;
}

attn_status cache_lines_write(const char *tool, const char *path, const char *lines,
                              bool (*is_replaced)(const void *user, const char *line),
                              const void *user, struct attn_error *error)
{
    char *text = NULL;
    const char *why;
    size_t length = 0;
    char *content = cache_lines_read(path, &why);
    FILE *out = open_memstream(&text, &length);
    attn_status status = ATTN_OK;
    if (out == NULL) {
        free(content);
        return cache_lines_fail(error, path, strerror(errno));
    }
    if (why != NULL) {
        fprintf(stderr, "%s: %s %s; it is written again\n", tool, path, why);
    }
    for (char *rest = content, *line; (line = strsep(&rest, "\n")) != NULL;) {
        if (*line != '\0' && !is_replaced(user, line)) {
            fprintf(out, "%s\n", line);
        }
    }
    fputs(lines, out);
    if (fclose(out) != 0) {
        status = cache_lines_fail(error, path, "no memory");
    } else if (length > MAX_FILE) {
        status = cache_lines_fail(error, path, "would be larger than 1 MiB, which is not read");
    } else if (!cache_file_write(path, text, length)) {
        status = cache_lines_fail(error, path, strerror(errno));
    }
    free(content);
    free(text);
    return status;
}
