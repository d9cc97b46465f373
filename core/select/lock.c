/* SPDX-License-Identifier: Apache-2.0 */
#include "select/lock.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "host/cache_file.h"
#include "host/conformance.h"
#include "host/lock_text.h"
#include "runtime/discover.h"
#include "select/export.h"
#include "select/ranks.h"
#include "util/hash.h"

#define WRITE "write:"

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
        text_add_string(out, "ranks declared\n");
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
    text_add_string(out, LOCK_HEAD);
    assignment_add_layers(out, assignment);
    (void)core_file(core);
    add_file(out, "core", ATTN_LIBRARY_VERSION, core);
    add_plugins(out, assignment);
    text_add(out, "device arch=%s\n", device != NULL ? device->arch : "");
    if (device != NULL && device->device.type != ATTN_DEVICE_CPU) {
        text_add(out, "drivers versions=%016" PRIx64 "\n", drivers_hash(HASH_INIT));
    }
    add_ranks(out, assignment);
    text_add_string(out, LOCK_END);
}

static attn_status fail(struct attn_error *error, const char *path, const char *why)
{
    return error_set(error, ATTN_ERROR_IO, "ATTN_LOCK", "%s %s", path, why);
}

static void add_difference(void *user, const char *difference)
{
    struct text *text = user;
    if (text->length < ATTN_ERROR_MESSAGE_SIZE) {
        text_add(text, "%s%s", text->length > 0 ? "; " : "", difference);
    }
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
    if (fewest == 0) {
        return ATTN_OK;
    }
    struct text text, whole;
    text_init(&text, &runtime->host);
    text_init(&whole, &runtime->host);
    lock_compare(nearest, own, "the lock", "this choice", add_difference, &text);
    text_add(&whole, "%s holds another choice: %s", path, text_get(&text));
    text_finish(&text);
    return text_finish_error(&whole, ATTN_ERROR_REFUSED, "ATTN_LOCK", error);
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

attn_status lock_apply(const attn_assignment *assignment, struct attn_error *error)
{
    const attn_runtime *runtime = assignment->runtime;
    const char *lock = runtime->settings.lock;
    if (lock == NULL || lock[0] == '\0') {
        return ATTN_OK;
    }
    const bool writes = lock[0] != '/';
    struct text record;
    text_init(&record, &runtime->host);
    add_record(&record, assignment);
    attn_status status =
        apply(runtime, lock + (writes ? sizeof WRITE - 1 : 0), writes, &record, error);
    text_finish(&record);
    return status;
}
