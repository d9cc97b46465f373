/* SPDX-License-Identifier: Apache-2.0 */
/* Which files may be plugins. */
#include "runtime/load.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_PLUGINS 256
#define MAX_CONFIGURED                                                                             \
    192 /* most files of ATTN_PLUGIN_PATH: whatever lies there, the rest is the own folder's */

/* One more file, of at most `most` in all; the others are passed over with a warning. */
static attn_status add_file(attn_runtime *runtime, int32_t most, const char *file,
                            attn_status status, const char *reason)
{
    if (runtime->plugins == NULL) {
        runtime->plugins = arena_array(&runtime->arena, MAX_PLUGINS, sizeof *runtime->plugins);
        if (runtime->plugins == NULL) {
            return ATTN_ERROR_OUT_OF_MEMORY;
        }
    }
    for (int32_t i = 0; i < runtime->num_plugins; i++) {
        if (strcmp(runtime->plugins[i].file, file) == 0) {
            return ATTN_OK;
        }
    }
    if (runtime->num_plugins >= most) {
        runtime_log(runtime, ATTN_LOG_WARN, "%s: passed over; %d plugin files are the most here",
                    file, most);
        return ATTN_OK;
    }
    struct plugin *plugin = &runtime->plugins[runtime->num_plugins];
    *plugin = (struct plugin){.file = arena_string(&runtime->arena, file),
                              .name = arena_string(&runtime->arena, ""),
                              .version = arena_string(&runtime->arena, ""),
                              .vendor = arena_string(&runtime->arena, ""),
                              .reason = arena_string(&runtime->arena, reason),
                              .status = status};
    if (runtime->arena.failed) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    runtime->num_plugins++;
    return ATTN_OK;
}

/* Notes a place for runtime->searched, and logs it. */
__attribute__((format(printf, 3, 4))) static void note(attn_runtime *runtime, int32_t level,
                                                       const char *format, ...)
{
    char line[PATH_MAX + 120];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    size_t used = strlen(runtime->searched);
    snprintf(runtime->searched + used, sizeof runtime->searched - used, "%s%s",
             used > 0 ? "; " : "", line);
    runtime_log(runtime, level, "plugins: %s", line);
}

static int is_plugin_name(const struct dirent *entry)
{
    size_t length = strlen(entry->d_name);
    return strncmp(entry->d_name, "attn_", 5) == 0 && length > 8 &&
           strcmp(entry->d_name + length - 3, ".so") == 0;
}

static int is_folder_name(const struct dirent *entry)
{
    return entry->d_name[0] != '.' && entry->d_type != DT_REG; /* generated headers stand there */
}

/* Hands on the entries of a folder that pass, in the order of their names; *count below 0: it
 * cannot be read. */
static attn_status walk(attn_runtime *runtime, int32_t most, const char *folder,
                        int (*passes)(const struct dirent *),
                        attn_status (*take)(attn_runtime *, int32_t, const char *), int *count)
{
    struct dirent **entries = NULL;
    attn_status status = ATTN_OK;
    *count = scandir(folder, &entries, passes, alphasort);
    for (int i = 0; i < *count; i++) {
        char path[PATH_MAX];
        int length = snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
        if (status == ATTN_OK && length < (int)sizeof path) {
            status = take(runtime, most, path);
        }
        free(entries[i]);
    }
    free(entries);
    return status;
}

static attn_status add_found(attn_runtime *runtime, int32_t most, const char *file)
{
    return add_file(runtime, most, file, ATTN_OK, "");
}

/* attn_*.so of one directory. A directory that is not there, or cannot be read, adds nothing but a
 * note. */
static attn_status add_folder(attn_runtime *runtime, int32_t most, const char *folder)
{
    int count;
    attn_status status = walk(runtime, most, folder, is_plugin_name, add_found, &count);
    if (count < 0) {
        note(runtime, errno == ENOENT ? ATTN_LOG_INFO : ATTN_LOG_WARN, "%s: %s", folder,
             strerror(errno));
    } else {
        note(runtime, ATTN_LOG_DEBUG, "%s: %d files attn_*.so", folder, count);
    }
    return status;
}

static attn_status add_path(attn_runtime *runtime, const char *path)
{
    struct stat info;
    char real[PATH_MAX], reason[PATH_MAX + 80];
    if (path[0] != '/') {
        snprintf(reason, sizeof reason, "'%s' in ATTN_PLUGIN_PATH is not an absolute path", path);
        runtime_log(runtime, ATTN_LOG_WARN, "plugins: %s", reason);
        return add_file(runtime, MAX_CONFIGURED, path, ATTN_ERROR_INVALID_ARGUMENT, reason);
    }
    if (realpath(path, real) == NULL || stat(real, &info) != 0) {
        snprintf(reason, sizeof reason, "%s", strerror(errno));
        runtime_log(runtime, ATTN_LOG_WARN, "plugins: '%s' in ATTN_PLUGIN_PATH: %s", path, reason);
        return add_file(runtime, MAX_CONFIGURED, path, ATTN_ERROR_NOT_FOUND, reason);
    }
    return S_ISDIR(info.st_mode) ? add_folder(runtime, MAX_CONFIGURED, real)
                                 : add_file(runtime, MAX_CONFIGURED, real, ATTN_OK, "");
}

static attn_status add_configured(attn_runtime *runtime)
{
    const char *at = runtime->settings.plugin_path;
    attn_status status = ATTN_OK;
    while (*at != '\0' && status == ATTN_OK) {
        char path[PATH_MAX];
        size_t length = strcspn(at, ":");
        if (length > 0 && length < sizeof path) {
            memcpy(path, at, length);
            path[length] = '\0';
            status = add_path(runtime, path);
        } else if (length > 0) { /* kept by its beginning, so that it can be recognised */
            char reason[120];
            snprintf(path, sizeof path, "%.60s...", at);
            snprintf(reason, sizeof reason,
                     "an entry of %zu bytes in ATTN_PLUGIN_PATH; a path has at most %d", length,
                     PATH_MAX - 1);
            status = add_file(runtime, MAX_CONFIGURED, path, ATTN_ERROR_INVALID_ARGUMENT, reason);
        }
        at += length + (at[length] == ':');
    }
    return status;
}

/* The file that the kernel has mapped at an address of this process. The linker knows only the name
 * by which the file was opened, and a relative name means another file once the working directory
 * has changed. */
static bool mapped_file(const void *address, char file[PATH_MAX])
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[PATH_MAX + 128];
    bool found = false;
    while (maps != NULL && !found && fgets(line, sizeof line, maps) != NULL) {
        unsigned long long begin, end;
        char *path = strchr(line, '/');
        if (path != NULL && sscanf(line, "%llx-%llx", &begin, &end) == 2 &&
            (uintptr_t)address >= begin && (uintptr_t)address < end) {
            path[strcspn(path, "\n")] = '\0';
            found = realpath(path, file) != NULL;
            break;
        }
    }
    if (maps != NULL) {
        fclose(maps);
    }
    return found;
}

/* What Meson keeps in every build tree; a folder named core alone is no sign. */
static bool is_build_tree(const char *folder, size_t length)
{
    char mark[PATH_MAX];
    struct stat info;
    return snprintf(mark, sizeof mark, "%.*s/meson-private/coredata.dat", (int)length, folder) <
               (int)sizeof mark &&
           stat(mark, &info) == 0 && S_ISREG(info.st_mode);
}

/* <build>/core/libattn.so.1, or <libdir>/libattn.so.1. */
bool core_file(char path[PATH_MAX])
{
    Dl_info info;
    /* Any object of this library shows where it was loaded from. */
    static const char here;
    return (dladdr(&here, &info) != 0 && info.dli_fname != NULL && info.dli_fname[0] == '/' &&
            realpath(info.dli_fname, path) != NULL) ||
           mapped_file(&here, path);
}

bool core_place(char folder[PATH_MAX], bool *build_tree)
{
    if (!core_file(folder)) {
        return false;
    }
    *strrchr(folder, '/') = '\0';
    size_t length = strlen(folder);
    *build_tree = length > 5 && strcmp(folder + length - 5, "/core") == 0 &&
                  is_build_tree(folder, length - 5);
    if (*build_tree) {
        folder[length - 5] = '\0';
    }
    return true;
}

/* The working directory never steers discovery: where the core's place is not known, only
 * ATTN_PLUGIN_PATH counts. */
static attn_status add_own(attn_runtime *runtime)
{
    char place[PATH_MAX], folder[PATH_MAX + 16];
    struct stat there;
    bool build_tree;
    if (!core_place(place, &build_tree)) {
        note(runtime, ATTN_LOG_WARN,
             "the folder of libattn.so.1 is not known (no /proc), so only ATTN_PLUGIN_PATH counts");
        return ATTN_OK;
    }
    snprintf(folder, sizeof folder, "%s/%s", place, build_tree ? "plugins" : "attn");
    if (!build_tree) {
        return add_folder(runtime, MAX_PLUGINS, folder);
    }
    int count; /* a build tree has one folder a plugin */
    return stat(folder, &there) == 0 && S_ISDIR(there.st_mode)
               ? walk(runtime, MAX_PLUGINS, folder, is_folder_name, add_folder, &count)
               : ATTN_OK;
}

attn_status plugins_discover(attn_runtime *runtime, struct attn_error *error)
{
    attn_status status = add_configured(runtime);
    if (status == ATTN_OK && !runtime->settings.no_default_plugins) {
        status = add_own(runtime);
    }
    return status == ATTN_OK
               ? status
               : error_set(error, status, "plugins", "no memory for the list of plugins");
}
