/* SPDX-License-Identifier: Apache-2.0 */
#include "select/lines.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "host/cache_file.h"

#define MAX_FILE (1 << 20)

/* The file's text; empty where there is none, or where it is not trusted. False without memory. */
static bool read_text(const attn_runtime *runtime, const char *path, const char *things,
                      struct arena *arena, char **content, size_t *size)
{
    struct cache_file file;
    const char *why = cache_file_open(&file, path, MAX_FILE);
    *size = 0;
    if (why == NULL && file.descriptor >= 0) {
        *size = (size_t)file.info.st_size;
        *content = arena_alloc(arena, *size + 1);
        if (*content == NULL) {
            cache_file_close(&file);
            return false;
        }
        why = cache_file_read(&file, *content) ? NULL : "was cut while it was read";
    }
    if (why != NULL) {
        *size = 0;
        runtime_log(runtime, ATTN_LOG_WARN, "%s %s; no %s are used", path, why, things);
    }
    return true;
}

static int32_t count_lines(const char *content, size_t size)
{
    int32_t count = 1;
    for (size_t i = 0; i < size; i++) {
        count += content[i] == '\n';
    }
    return count;
}

bool lines_read(struct lines *lines, const attn_runtime *runtime, const char *name,
                const char *things, struct arena *arena)
{
    char path[PATH_MAX], *content = NULL, *next;
    size_t size;
    *lines = (struct lines){NULL, 0};
    const char *folder = runtime->settings.cache_dir;
    if (folder == NULL || folder[0] == '\0' ||
        snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) {
        return true;
    }
    if (!read_text(runtime, path, things, arena, &content, &size)) {
        return false;
    }
    if (size == 0) {
        return true;
    }
    lines->items = arena_array(arena, (size_t)count_lines(content, size), sizeof *lines->items);
    if (lines->items == NULL) {
        return false;
    }
    for (char *line = content; line < content + size; line = next) {
        next = memchr(line, '\n', (size_t)(content + size - line));
        next = next != NULL ? next : content + size;
        *next++ = '\0';
        if (line[0] != '\0' && line[0] != '#') {
            lines->items[lines->count++] = line;
        }
    }
    return true;
}

void lines_warn(const attn_runtime *runtime, const char *name, const char *thing, int32_t broken)
{
    if (broken > 0) {
        runtime_log(runtime, ATTN_LOG_WARN, "%s/%s: %d lines are no %s and were passed over",
                    runtime->settings.cache_dir, name, broken, thing);
    }
}
