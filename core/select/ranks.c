/* SPDX-License-Identifier: Apache-2.0 */
#include "select/ranks.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "host/cache_file.h"
#include "host/conformance.h"
#include "select/names.h"
#include "util/counts.h"
#include "util/hash.h"

#define MAX_FILE (1 << 20)

struct lines {
    char **items; /* neither empty ones nor those that begin with '#' */
    int32_t count;
};

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

/* The lines of `<cache_dir>/name`. None where there is no file, or one that others could have
 * written (with a warning that says which `things` are not used). False without memory. */
static bool lines_read(struct lines *lines, const attn_runtime *runtime, const char *name,
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

static void lines_warn(const attn_runtime *runtime, const char *name, const char *thing,
                       int32_t broken)
{
    if (broken > 0) {
        runtime_log(runtime, ATTN_LOG_WARN, "%s/%s: %d lines are no %s and were passed over",
                    runtime->settings.cache_dir, name, broken, thing);
    }
}

static const char *judge(const attn_runtime *runtime, const struct backend *backend,
                         const struct lines *lines)
{
    const uint64_t drivers = drivers_hash(HASH_INIT);
    struct conformance record;
    uint64_t file;
    for (int32_t i = lines->count - 1; i >= 0; i--) {
        if (conformance_parse(&record, lines->items[i]) &&
            conformance_is_of(&record, backend->full_name, backend->caps.device)) {
            return file_hash(runtime->plugins[backend->plugin].file, &file)
                       ? conformance_lacks(&record, file, drivers)
                       : "a plugin file that cannot be read";
        }
    }
    return "no record";
}

bool conformant_read(struct conformant *conformant, const attn_runtime *runtime,
                     struct arena *arena)
{
    struct lines lines;
    struct conformance record;
    int32_t broken = 0;
    conformant->lacks =
        arena_array(arena, (size_t)runtime->num_backends + 1, sizeof *conformant->lacks);
    if (conformant->lacks == NULL ||
        !lines_read(&lines, runtime, CONFORMANCE_FILE, "records of conformance", arena)) {
        return false;
    }
    for (int32_t i = 0; i < lines.count; i++) {
        broken += !conformance_parse(&record, lines.items[i]);
    }
    lines_warn(runtime, CONFORMANCE_FILE, "record", broken);
    for (int32_t b = 0; b < runtime->num_backends; b++) {
        conformant->lacks[b] = judge(runtime, &runtime->backends[b], &lines);
    }
    return true;
}

bool ranks_read(struct ranks *ranks, const attn_runtime *runtime, struct arena *arena)
{
    struct lines lines;
    *ranks = (struct ranks){.items = NULL};
    if (!lines_read(&lines, runtime, RANKS_FILE, "measured ranks", arena)) {
        return false;
    }
    if (lines.count == 0) {
        return true;
    }
    ranks->items = arena_array(arena, (size_t)lines.count, sizeof *ranks->items);
    ranks->files = arena_array(arena, (size_t)runtime->num_plugins + 1, sizeof *ranks->files);
    if (ranks->items == NULL || ranks->files == NULL) {
        return false;
    }
    for (int32_t i = 0; i < lines.count; i++) {
        ranks->count += measurement_parse(&ranks->items[ranks->count], lines.items[i]);
    }
    ranks->drivers = drivers_hash(HASH_INIT);
    lines_warn(runtime, RANKS_FILE, "measurement", lines.count - ranks->count);
    return true;
}

/* Large files are hashed once, and those alone that a line is of. */
static uint64_t hash_of(struct ranks *ranks, const attn_runtime *runtime, int32_t plugin)
{
    struct hashed_file *file = &ranks->files[plugin];
    if (!file->read) {
        file->read = true;
        (void)file_hash(runtime->plugins[plugin].file, &file->hash);
    }
    return file->hash;
}

static bool is_repeated(const struct ranks *ranks, int32_t index)
{
    const struct measurement *m = &ranks->items[index];
    for (int32_t i = index + 1; i < ranks->count; i++) {
        if (strcmp(ranks->items[i].bucket, m->bucket) == 0 &&
            measurement_is_of(&ranks->items[i], m->device, m->shape, m->phase, m->backend)) {
            return true;
        }
    }
    return false;
}

struct rank ranks_find(struct ranks *ranks, const attn_runtime *runtime,
                       const struct attn_layer_desc *layer, int32_t phase,
                       const struct backend *backend)
{
    char shape[MEASUREMENT_SHAPE_SIZE];
    struct rank rank = {1, 0, NULL};
    if (ranks->count == 0) {
        return rank;
    }
    measurement_shape(layer, name_of_dtype(layer->dtype),
                      kv_dtypes_text(layer->kv_dtype, layer->kv_dtype_v).text, shape);
    for (int32_t i = 0; i < ranks->count; i++) {
        const struct measurement *m = &ranks->items[i];
        if (measurement_is_of(m, ranks->device, shape, name_of_phase(phase), backend->full_name) &&
            !is_repeated(ranks, i)) {
            const char *stale =
                measurement_stale(m, hash_of(ranks, runtime, backend->plugin), ranks->drivers);
            rank.time *= (double)m->nanoseconds;
            rank.buckets++;
            rank.stale = stale != NULL ? stale : rank.stale;
        }
    }
    return rank;
}
