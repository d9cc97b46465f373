/* SPDX-License-Identifier: Apache-2.0 */
/* Answers of probes on file. */
#include "isolation.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "host/cache_file.h"
#include "runtime/load.h"
#include "util/hash.h"

#define PREFIX "probe-"

/* False: no cache. */
static bool entry_path(const attn_runtime *runtime, const char *file, char path[PATH_MAX])
{
    const char *folder = runtime->settings.cache_dir;
    const uint64_t name =
        hash_string(((const struct isolated *)runtime->isolated)->machine.name, file);
    return folder[0] == '/' && snprintf(path, PATH_MAX, "%s/" PREFIX "%016llx", folder,
                                        (unsigned long long)name) < PATH_MAX;
}

attn_status answer_read(attn_runtime *runtime, struct cache_file *file, struct answer *answer,
                        const char **wrong)
{
    answer->size = (size_t)file->info.st_size;
    answer->bytes = runtime_alloc(runtime, answer->size);
    if (answer->bytes == NULL) {
        cache_file_close(file);
        runtime->arena.failed = true;
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    *wrong = cache_file_read(file, answer->bytes)
                 ? record_read(&answer->record, answer->bytes, answer->size)
                 : "is truncated";
    return ATTN_OK;
}

void answer_finish(const attn_runtime *runtime, struct answer *answer)
{
    runtime_free(runtime, answer->bytes, answer->size);
    *answer = (struct answer){.bytes = NULL};
}

/* NULL, or why the record is not an answer for this file on this machine. "": nothing to warn of.
 */
static const char *disagreement(const struct record *record, const char *file,
                                const struct probe_key *key, time_t age, int32_t deadline_ms)
{
    const bool late = record->status == ATTN_ERROR_TIMEOUT;
    if (strcmp(record->file, file) != 0) {
        return "is of another plugin file";
    }
    if (!file_id_same(&record->key.file, &key->file)) {
        return "is older than the plugin file";
    }
    if (record->key.state != key->state) {
        return "is of another state of drivers, devices, libraries or libattn";
    }
    if (late && deadline_ms > record->deadline_ms) {
        return "";
    }
    return record->status == ATTN_OK ||
                   (age >= 0 && age <= (late ? CACHE_TIMEOUT_SECONDS : CACHE_REFUSAL_SECONDS))
               ? NULL
               : "";
}

attn_status cache_read(attn_runtime *runtime, const char *file, const struct probe_key *key,
                       struct answer *answer)
{
    char path[PATH_MAX];
    struct cache_file on_file;
    attn_status status = ATTN_ERROR_NOT_FOUND;
    if (!entry_path(runtime, file, path)) {
        return status;
    }
    const char *why = cache_file_open(&on_file, path, RECORD_MAX_SIZE);
    if (why == NULL && on_file.descriptor >= 0) {
        status = answer_read(runtime, &on_file, answer, &why);
        answer->age = time(NULL) - on_file.info.st_mtime;
        why = why != NULL || status != ATTN_OK
                  ? why
                  : disagreement(&answer->record, file, key, answer->age,
                                 runtime->settings.probe_deadline_ms);
    }
    if (why != NULL) {
        status = ATTN_ERROR_NOT_FOUND;
        answer_finish(runtime, answer);
        if (why[0] != '\0') {
            runtime_log(runtime, ATTN_LOG_WARN, "%s %s; %s is probed again", path, why, file);
        }
    }
    return status;
}

static void prune(const char *folder)
{
    DIR *directory = opendir(folder);
    const struct dirent *entry;
    struct stat info;
    while (directory != NULL && (entry = readdir(directory)) != NULL) {
        if (strncmp(entry->d_name, PREFIX, sizeof PREFIX - 1) == 0 &&
            fstatat(dirfd(directory), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
            info.st_uid == geteuid() && time(NULL) - info.st_mtime > CACHE_MAX_AGE_SECONDS) {
            (void)unlinkat(dirfd(directory), entry->d_name, 0);
        }
    }
    if (directory != NULL) {
        closedir(directory);
    }
}

void cache_write(attn_runtime *runtime, const char *file, const void *record, size_t size)
{
    char path[PATH_MAX];
    if (!entry_path(runtime, file, path)) {
        return;
    }
    if (!cache_file_write(path, record, size)) {
        runtime_log(runtime, ATTN_LOG_INFO, "%s cannot be written: %s", path, strerror(errno));
    }
    struct isolated *isolated = runtime->isolated;
    if (!isolated->cache_pruned) {
        isolated->cache_pruned = true;
        prune(runtime->settings.cache_dir);
    }
}

void cache_forget(const attn_runtime *runtime, const char *file)
{
    char path[PATH_MAX];
    if (entry_path(runtime, file, path)) {
        (void)unlink(path);
    }
}
