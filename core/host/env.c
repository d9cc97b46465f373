/* SPDX-License-Identifier: Apache-2.0 */
#include "host/env.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "host/cache_file.h"
#include "runtime/runtime.h"

#define MAX_THREADS 4096
/* The first call of a driver's management library takes seconds on a host of many devices. */
#define DEFAULT_DEADLINE_MS 10000

const char *env_get(const struct attn_runtime_options *options, const char *name)
{
    const char *value = options->ignore_environment ? NULL : secure_getenv(name);
    return value != NULL && value[0] != '\0' ? value : NULL;
}

/* -1 for text that is no number. */
static int32_t log_level_of(const char *text)
{
    static const char *const levels[] = {"error", "warn", "info", "debug", "trace"};
    for (int32_t i = 0; i < 5; i++) {
        if (strcmp(text, levels[i]) == 0) {
            return i;
        }
    }
    return -1;
}

static attn_status read_threads(struct settings *settings,
                                const struct attn_runtime_options *options,
                                struct attn_error *error)
{
    const char *text = env_get(options, "ATTN_NUM_THREADS");
    long threads = options->num_threads;
    if (threads == 0 && text != NULL) {
        char *end;
        threads = strtol(text, &end, 10);
        threads = *end == '\0' ? threads : -1;
    } else if (threads == 0) {
        threads = sysconf(_SC_NPROCESSORS_ONLN);
        threads = threads > 0 ? threads : 1;
    }
    BAD_IF(threads < 1 || threads > MAX_THREADS, "ATTN_NUM_THREADS",
           "'%s' is not a number of threads; 1 to %d are allowed",
           options->num_threads == 0 && text != NULL ? text : "num_threads", MAX_THREADS);
    settings->num_threads = (int32_t)threads;
    return ATTN_OK;
}

static attn_status read_switches(struct settings *settings,
                                 const struct attn_runtime_options *options,
                                 struct attn_error *error)
{
    const char *level = env_get(options, "ATTN_LOG"), *validate = env_get(options, "ATTN_VALIDATE");
    settings->log_level = options->log_level > 0 ? options->log_level - 1 : ATTN_LOG_WARN;
    if (options->log_level == 0 && level != NULL) {
        settings->log_level = log_level_of(level);
    }
    BAD_IF(settings->log_level < 0 || settings->log_level > ATTN_LOG_TRACE, "ATTN_LOG",
           "'%s' is no level; error, warn, info, debug and trace are",
           level != NULL ? level : "log_level");
    settings->validate = options->validate > 0;
    if (options->validate == 0 && validate != NULL) {
        BAD_IF(strcmp(validate, "0") != 0 && strcmp(validate, "1") != 0, "ATTN_VALIDATE",
               "'%s'; 0 or 1", validate);
        settings->validate = validate[0] == '1';
    }

    settings->isolation = options->isolation;
    settings->probe_deadline_ms =
        options->probe_deadline_ms > 0 ? options->probe_deadline_ms : DEFAULT_DEADLINE_MS;
    settings->no_default_plugins = options->no_default_plugins != 0;
    return ATTN_OK;
}

static const char *first_of(const char *option, const char *variable, const char *otherwise)
{
    return option != NULL ? option : variable != NULL ? variable : otherwise;
}

attn_status settings_read(struct settings *settings, const struct attn_runtime_options *options,
                          struct arena *arena, struct attn_error *error)
{
    char cache_dir[4096];
    TRY(read_threads(settings, options, error));
    TRY(read_switches(settings, options, error));
    /* Empty is a choice here: no cache. */
    const char *chosen = options->ignore_environment ? NULL : secure_getenv("ATTN_CACHE_DIR");
    const char *own = options->cache_dir != NULL ? options->cache_dir : chosen;
    cache_dir[0] = '\0';
    if (own == NULL) {
        cache_folder_default(cache_dir, sizeof cache_dir, env_get(options, "XDG_CACHE_HOME"),
                             env_get(options, "HOME"), &settings->no_cache);
    }
    settings->backend =
        arena_string(arena, first_of(options->backend, env_get(options, "ATTN_BACKEND"), ""));
    settings->plugin_path = arena_string(
        arena, first_of(options->plugin_path, env_get(options, "ATTN_PLUGIN_PATH"), ""));
    const char *lock = env_get(options, "ATTN_LOCK");
    settings->lock = arena_string(arena, lock != NULL ? lock : "");
    settings->cache_dir = arena_string(arena, own != NULL ? own : cache_dir);
    NO_MEMORY_IF(arena->failed, "settings", "the settings");
    /* The working directory steers nothing. */
    BAD_IF(settings->cache_dir[0] != '\0' && settings->cache_dir[0] != '/', "ATTN_CACHE_DIR",
           "'%s' is not an absolute path", settings->cache_dir);
    BAD_IF(settings->lock[0] != '\0' && settings->lock[0] != '/' &&
               strncmp(settings->lock, "write:/", 7) != 0 &&
               strncmp(settings->lock, "take:/", 6) != 0,
           "ATTN_LOCK", "'%s' is neither an absolute path nor 'write:' or 'take:' before one",
           settings->lock);
    return ATTN_OK;
}
