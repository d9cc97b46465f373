/* SPDX-License-Identifier: Apache-2.0 */
/* Measured times and records of conformance. */
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "host/cache_file.h"
#include "host/conformance.h"
#include "operators.h"
#include "select/names.h"
#include "util/hash.h"

#define MAX_FILE (1 << 20)

/* The text of `<cache_dir>/name`. Empty where there is no file, or one that others could have
 * written (with a warning that says which `things` are not used). NULL without memory. */
static char *read_text(const attn_runtime *runtime, const char *name, const char *things,
                       struct arena *arena)
{
    char path[PATH_MAX];
    struct cache_file file = {.descriptor = -1};
    const char *folder = runtime->settings.cache_dir, *why = NULL;
    if (folder != NULL && folder[0] != '\0' &&
        snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path) {
        why = cache_file_open(&file, path, MAX_FILE);
    }
    const size_t size = why == NULL && file.descriptor >= 0 ? (size_t)file.info.st_size : 0;
    char *text = arena_alloc(arena, size + 1);
    if (text == NULL) {
        cache_file_close(&file);
    } else if (size > 0 && !cache_file_read(&file, text)) {
        why = "was cut while it was read";
    } else if (strlen(text) != size) {
        why = "has a NUL";
    }
    if (why != NULL && text != NULL) {
        text[0] = '\0';
        runtime_log(runtime, ATTN_LOG_WARN, "%s %s; no %s are used", path, why, things);
    }
    return text;
}

/* The next line that is neither empty nor begins with '#'; NULL after the last. */
static const char *next_line(char **rest)
{
    const char *line = strsep(rest, "\n");
    while (line != NULL && (line[0] == '\0' || line[0] == '#')) {
        line = strsep(rest, "\n");
    }
    return line;
}

static void warn(const attn_runtime *runtime, const char *name, const char *thing, int32_t broken)
{
    if (broken > 0) {
        runtime_log(runtime, ATTN_LOG_WARN, "%s/%s: %d lines are no %s and were passed over",
                    runtime->settings.cache_dir, name, broken, thing);
    }
}

/* Large files are hashed once, and those alone that a line is of. */
static uint64_t hash_of(struct known *known, int32_t plugin)
{
    struct hashed_file *file = &known->files[plugin];
    if (!file->read) {
        file->read = true;
        (void)file_hash(known->runtime->plugins[plugin].file, &file->hash);
    }
    return file->hash;
}

/* The last record of a backend counts. */
static bool read_records(struct known *known, struct arena *arena)
{
    const attn_runtime *runtime = known->runtime;
    const size_t count = (size_t)runtime->num_backends;
    char *rest = read_text(runtime, CONFORMANCE_FILE, "records of conformance", arena);
    struct conformance record;
    int32_t broken = 0;
    known->lacks = arena_array(arena, count + 1, sizeof *known->lacks);
    if (rest == NULL || known->lacks == NULL) {
        return false;
    }
    for (size_t b = 0; b < count; b++) {
        known->lacks[b] = "no record";
    }
    for (const char *line; (line = next_line(&rest)) != NULL;) {
        const bool parsed = conformance_parse(&record, line);
        broken += !parsed;
        for (size_t b = 0; b < count && parsed; b++) {
            const struct backend *backend = &runtime->backends[b];
            if (conformance_is_of(&record, backend->full_name, backend->caps.device)) {
                const uint64_t file = hash_of(known, backend->plugin);
                known->lacks[b] = file != 0 ? conformance_lacks(&record, file, known->drivers)
                                            : "a plugin file that cannot be read";
            }
        }
    }
    warn(runtime, CONFORMANCE_FILE, "record", broken);
    return true;
}

static bool read_measurements(struct known *known, struct arena *arena)
{
    char *rest = read_text(known->runtime, RANKS_FILE, "measured ranks", arena);
    size_t most = 1;
    int32_t broken = 0;
    for (const char *at = rest; at != NULL && *at != '\0'; at++) {
        most += *at == '\n';
    }
    known->items = rest != NULL ? arena_array(arena, most, sizeof *known->items) : NULL;
    if (known->items == NULL) {
        return false;
    }
    for (const char *line; (line = next_line(&rest)) != NULL;) {
        const bool parsed = measurement_parse(&known->items[known->count], line);
        known->count += parsed;
        broken += !parsed;
    }
    warn(known->runtime, RANKS_FILE, "measurement", broken);
    return true;
}

struct known *known_read(const attn_runtime *runtime, const struct attn_device_info *device,
                         bool conformance, struct arena *arena)
{
    struct known *known = arena_alloc(arena, sizeof *known);
    if (known == NULL) {
        return NULL;
    }
    known->runtime = runtime;
    known->files = arena_array(arena, (size_t)runtime->num_plugins + 1, sizeof *known->files);
    if (known->files == NULL || !read_measurements(known, arena)) {
        return NULL;
    }
    known->drivers = known->count > 0 || conformance ? drivers_hash(HASH_INIT) : 0;
    measurement_device(device, known->device);
    return !conformance || read_records(known, arena) ? known : NULL;
}

static bool is_repeated(const struct known *known, int32_t index)
{
    const struct measurement *m = &known->items[index];
    for (int32_t i = index + 1; i < known->count; i++) {
        if (strcmp(known->items[i].bucket, m->bucket) == 0 &&
            measurement_is_of(&known->items[i], m->device, m->shape, m->phase, m->backend)) {
            return true;
        }
    }
    return false;
}

struct rank known_rank(struct known *known, const struct attn_layer_desc *layer, int32_t phase,
                       const struct backend *backend)
{
    char shape[MEASUREMENT_SHAPE_SIZE];
    struct rank rank = {1, 0, NULL};
    if (known->count == 0) {
        return rank;
    }
    measurement_shape(layer, name_of(ATTN_NAMES_DTYPE, layer->dtype),
                      kv_dtypes_text(layer->kv_dtype, layer->kv_dtype_v).text, shape);
    for (int32_t i = 0; i < known->count; i++) {
        const struct measurement *m = &known->items[i];
        if (measurement_is_of(m, known->device, shape, name_of(ATTN_NAMES_PHASE, phase),
                              backend->full_name) &&
            !is_repeated(known, i)) {
            const char *stale =
                measurement_stale(m, hash_of(known, backend->plugin), known->drivers);
            rank.time *= (double)m->nanoseconds;
            rank.buckets++;
            rank.stale = stale != NULL ? stale : rank.stale;
        }
    }
    return rank;
}

const char *known_lacks(const struct known *known, const struct backend *backend)
{
    return known->lacks[backend - known->runtime->backends];
}
