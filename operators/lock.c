/* SPDX-License-Identifier: Apache-2.0 */
/* ATTN_LOCK: the same choice again, or a refusal. */
#include "operators.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "host/cache_file.h"
#include "host/conformance.h"
#include "host/lock_text.h"
#include "runtime/load.h"
#include "util/hash.h"

#define TAKE "take:"

static void add_file(struct text *out, const char *key, const char *value, const char *path)
{
    uint64_t hash = 0;
    (void)file_hash(path, &hash);
    text_add(out, "%s %s file=%016" PRIx64 "\n", key, value, hash);
}

static void add_plugins(struct text *out, const attn_assignment *assignment)
{
    const attn_runtime *runtime = assignment->runtime;
    for (int32_t p = 0; p < runtime->num_plugins; p++) {
        const struct plugin *plugin = &runtime->plugins[p];
        bool used = false;
        for (int32_t i = 0; i < assignment->num_layers * NUM_PHASES && !used; i++) {
            const int32_t backend =
                assignment->layers[i / NUM_PHASES].phases[i % NUM_PHASES].choice.backend;
            used = backend >= 0 && runtime->backends[backend].plugin == p;
        }
        if (used) {
            char key[80];
            snprintf(key, sizeof key, "plugin %.63s", plugin->name);
            add_file(out, key, plugin->version, plugin->file);
        }
    }
}

/* Whether measured times or declared ranks decided. */
static void add_ranks(struct text *out, const attn_assignment *assignment)
{
    char path[PATH_MAX];
    uint64_t hash = 0;
    bool measured = false;
    for (int32_t i = 0; i < assignment->num_layers * NUM_PHASES && !measured; i++) {
        measured = assignment->layers[i / NUM_PHASES].phases[i % NUM_PHASES].choice.measured;
    }
    if (!measured) {
        text_add(out, "ranks declared\n");
        return;
    }
    snprintf(path, sizeof path, "%s/%s", assignment->runtime->settings.cache_dir, RANKS_FILE);
    (void)file_hash(path, &hash);
    text_add(out, "ranks measured=%016" PRIx64 "\n", hash);
}

static void add_record(struct text *out, const attn_assignment *assignment)
{
    const struct attn_device_info *device = assignment->device;
    char core[PATH_MAX] = "";
    text_add(out, LOCK_HEAD);
    assignment_add_layers(out, assignment);
    (void)core_file(core);
    add_file(out, "core", ATTN_LIBRARY_VERSION, core);
    add_plugins(out, assignment);
    text_add(out, "device arch=%s\n", device != NULL ? device->arch : "");
    if (device != NULL && device->device.type != ATTN_DEVICE_CPU) {
        text_add(out, "drivers versions=%016" PRIx64 "\n", drivers_hash(HASH_INIT));
    }
    add_ranks(out, assignment);
    text_add(out, LOCK_END);
}

static attn_status fail(struct attn_error *error, const char *path, const char *why)
{
    return error_set(error, ATTN_ERROR_IO, "ATTN_LOCK", "%s %s", path, why);
}

/* `file`, which is cut into records, against `record`. */
static attn_status hold(const attn_runtime *runtime, const char *path, char *file, char *record,
                        struct attn_error *error)
{
    const char *nearest = NULL;
    char *at, *own = lock_next(&record);
    int32_t fewest = INT32_MAX;
    while (fewest > 0 && (at = lock_next(&file)) != NULL) {
        const int32_t count = lock_compare(at, own, "", "", NULL, NULL);
        nearest = count < fewest ? at : nearest;
        fewest = count < fewest ? count : fewest;
    }
    return fewest == 0 ? ATTN_OK
                       : refuse_choice(runtime, "ATTN_LOCK", path, nearest, own, "the lock", error);
}

/* Adds `record` to the open file, which has `size` bytes of text; on failure it keeps those. */
static attn_status append(int descriptor, const char *path, size_t size, const struct text *record,
                          struct attn_error *error)
{
    if (size + record->length > LOCK_MOST) {
        return fail(error, path, "would be larger than 1 MiB, which is not read");
    }
    if (!file_write(descriptor, text_get(record), record->length)) {
        const int why = errno;
        (void)!ftruncate(descriptor, (off_t)size);
        return fail(error, path, strerror(why));
    }
    return ATTN_OK;
}

static attn_status apply(const attn_runtime *runtime, const char *path, bool writes,
                         struct text *record, struct attn_error *error)
{
    char *file = runtime_alloc(runtime, LOCK_MOST + 1);
    if (record->failed || file == NULL) {
        runtime_free(runtime, file, LOCK_MOST + 1);
        return NO_MEMORY("ATTN_LOCK", "the lock");
    }
    attn_status status = ATTN_OK;
    const int access = writes ? O_RDWR | O_APPEND | O_CREAT : O_RDONLY;
    const int descriptor = open(path, access | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0666);
    /* Ranks of one job write one after the other. */
    if (descriptor < 0 || (writes && flock(descriptor, LOCK_EX) != 0)) {
        status = fail(error, path, strerror(errno));
        goto done;
    }
    const char *why = lock_read(descriptor, file);
    if (why != NULL && !(writes && strcmp(why, "is empty") == 0)) {
        status = fail(error, path, why);
    } else if (!writes) {
        status = hold(runtime, path, file, record->data, error);
    } else if (strstr(file, text_get(record)) == NULL) {
        status = append(descriptor, path, strlen(file), record, error);
    }
done:
    if (descriptor >= 0 && close(descriptor) != 0 && writes && status == ATTN_OK) {
        status = fail(error, path, strerror(errno));
    }
    runtime_free(runtime, file, LOCK_MOST + 1);
    return status;
}

/* The next layer's line of a record, without its end: whether it is of this layer, as asked for. */
static bool is_line_of(const char *line, size_t length, const struct attn_layer_desc *layer)
{
    static const char marker[] = " name=", size[] = " block_size=";
    const char *name = strstr(line, marker), *block = strstr(line, size);
    if (layer == NULL ||
        layer->struct_size < offsetof(struct attn_layer_desc, num_speculative_tokens) ||
        layer->name == NULL || name == NULL || block == NULL || name > line + length ||
        strncmp(line, "layer ", 6) != 0) {
        return false;
    }
    name += sizeof marker - 1;
    const size_t name_length = (size_t)(line + length - name);
    return strlen(layer->name) == name_length && strncmp(name, layer->name, name_length) == 0 &&
           (layer->block_size == 0 || atoi(block + sizeof size - 1) == layer->block_size);
}

/* The end of the lines of layers, if they are these; else NULL. */
static const char *match_record(const char *record, const struct attn_layer_desc *const *layers,
                                int32_t num_layers)
{
    const char *line = record + sizeof LOCK_HEAD - 1;
    for (int32_t i = 0; i < num_layers; i++) {
        const size_t length = strcspn(line, "\n");
        if (!is_line_of(line, length, layers[i])) {
            return NULL;
        }
        line += length + (line[length] == '\n');
    }
    return strncmp(line, "layer ", 6) != 0 ? line : NULL;
}

/* The lines of the first record of these layers, as import_rules takes them; without one *text is
 * left as it is. `file` is cut into records. */
static attn_status take_record(char *file, const struct attn_layer_desc *const *layers,
                               int32_t num_layers, struct arena *arena, const char **text,
                               struct attn_error *error)
{
    const size_t head = sizeof LOCK_HEAD - 1;
    const char *record, *end = NULL;
    while (end == NULL && (record = lock_next(&file)) != NULL) {
        end = strlen(record) > head ? match_record(record, layers, num_layers) : NULL;
        if (end != NULL) {
            const size_t length = (size_t)(end - record) - head;
            char *copy = arena_alloc(arena, sizeof EXPORT_HEAD + length + 1);
            NO_MEMORY_IF(copy == NULL, "ATTN_LOCK", "the lock");
            memcpy(copy, EXPORT_HEAD "\n", sizeof EXPORT_HEAD);
            memcpy(copy + sizeof EXPORT_HEAD, record + head, length);
            copy[sizeof EXPORT_HEAD + length] = '\0';
            *text = copy;
        }
    }
    return ATTN_OK;
}

attn_status lock_choice(const attn_runtime *runtime, const struct attn_layer_desc *const *layers,
                        int32_t num_layers, struct arena *arena, const char **text,
                        struct attn_error *error)
{
    const char *lock = runtime->settings.lock;
    if (lock == NULL || strncmp(lock, TAKE, sizeof TAKE - 1) != 0) {
        return ATTN_OK;
    }
    lock += sizeof TAKE - 1;
    char *file = runtime_alloc(runtime, LOCK_MOST + 1);
    NO_MEMORY_IF(file == NULL, "ATTN_LOCK", "the lock");
    const int descriptor = open(lock, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    const char *why = descriptor < 0 ? strerror(errno) : lock_read(descriptor, file);
    attn_status status = why != NULL ? fail(error, lock, why)
                                     : take_record(file, layers, num_layers, arena, text, error);
    if (descriptor >= 0) {
        close(descriptor);
    }
    runtime_free(runtime, file, LOCK_MOST + 1);
    return status;
}

attn_status lock_hold(const attn_assignment *assignment, struct attn_error *error)
{
    const attn_runtime *runtime = assignment->runtime;
    const char *lock = runtime->settings.lock;
    if (lock == NULL || lock[0] == '\0') {
        return ATTN_OK;
    }
    const bool writes = lock[0] == 'w';
    struct text record;
    text_init(&record, &runtime->host);
    add_record(&record, assignment);
    attn_status status = apply(runtime, strchr(lock, '/'), writes, &record, error);
    text_finish(&record);
    return status;
}
