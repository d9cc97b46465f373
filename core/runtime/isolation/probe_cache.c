/* SPDX-License-Identifier: Apache-2.0 */
/* Answers of probes on file. */
#include "runtime/isolation/isolation.h"

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
#include "runtime/runtime.h"
#include "util/hash.h"

#define PREFIX "probe-"

/* False: no cache. */
static bool entry_path(const attn_runtime *runtime, const char *file, char path[PATH_MAX])
{
    const char *folder = runtime->settings.cache_dir;
    const uint64_t name = hash_string(runtime->machine.name, file);
    return folder[0] == '/' && snprintf(path, PATH_MAX, "%s/" PREFIX "%016llx", folder,
                                        (unsigned long long)name) < PATH_MAX;
}

/* The bytes on file. *why: NULL where there is none, or the reason against it. */
static attn_status read_entry(const attn_runtime *runtime, const char *path,
                              struct cache_entry *entry, struct stat *info, const char **why)
{
    struct cache_file file;
    *why = cache_file_open(&file, path, RECORD_MAX_SIZE);
    if (*why != NULL || file.descriptor < 0) {
        return ATTN_ERROR_NOT_FOUND;
    }
    *info = file.info;
    entry->size = (size_t)info->st_size;
    entry->bytes = runtime_alloc(runtime, entry->size);
    if (entry->bytes == NULL) {
        cache_file_close(&file);
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    *why = cache_file_read(&file, entry->bytes) ? NULL : "is truncated";
    return ATTN_OK;
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
    if (!probe_key_same_file(&record->key, key)) {
        return "is older than the plugin file";
    }
    if (record->key.state != key->state) {
        return "is of another state of drivers, devices or libraries";
    }
    if (late && deadline_ms > record->deadline_ms) {
        return "";
    }
    return record->status == ATTN_OK ||
                   (age >= 0 && age <= (late ? CACHE_TIMEOUT_SECONDS : CACHE_REFUSAL_SECONDS))
               ? NULL
               : "";
}

attn_status cache_read(const attn_runtime *runtime, const char *file, const struct probe_key *key,
                       struct cache_entry *entry)
{
    char path[PATH_MAX];
    struct stat info;
    const char *why = NULL;
    *entry = (struct cache_entry){.bytes = NULL};
    if (!entry_path(runtime, file, path)) {
        return ATTN_ERROR_NOT_FOUND;
    }
    attn_status status = read_entry(runtime, path, entry, &info, &why);
    if (status == ATTN_OK && why == NULL) {
        why = record_read(&entry->record, entry->bytes, entry->size);
        entry->age = time(NULL) - info.st_mtime;
        why = why != NULL ? why
                          : disagreement(&entry->record, file, key, entry->age,
                                         runtime->settings.probe_deadline_ms);
        if (why == NULL) {
            return ATTN_OK;
        }
    }
    if (why != NULL && why[0] != '\0') {
        runtime_log(runtime, ATTN_LOG_WARN, "%s %s; %s is probed again", path, why, file);
    }
    cache_entry_finish(runtime, entry);
    return status == ATTN_ERROR_OUT_OF_MEMORY ? status : ATTN_ERROR_NOT_FOUND;
}

void cache_entry_finish(const attn_runtime *runtime, struct cache_entry *entry)
{
    runtime_free(runtime, entry->bytes, entry->size);
    *entry = (struct cache_entry){.bytes = NULL};
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
    if (!runtime->cache_pruned) {
        runtime->cache_pruned = true;
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
