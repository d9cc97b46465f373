/* SPDX-License-Identifier: Apache-2.0 */
/* From a file to what it offers: what is on file about it, else what its code says. */
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/load.h"
#include "runtime/probe.h"
#include "isolation.h"
#include "util/error.h"
#include "util/text.h"

#define MAX_SCANS 8 /* processes at once */

/* Our own lack of it, which take_plugin says. */
static attn_status no_memory(attn_runtime *runtime)
{
    runtime->arena.failed = true;
    return ATTN_ERROR_OUT_OF_MEMORY;
}

/* In this process. */
static attn_status ask(attn_runtime *runtime, struct plugin *plugin, struct found *found,
                       struct attn_error *why)
{
    TRY(plugin_load(runtime, plugin, why));
    runtime_stage(runtime, plugin->file, "probe");
    return plugin_probe(&runtime->host, plugin->table, found, why);
}

/* Takes over a record as if the plugin had just said it. */
static attn_status adopt(attn_runtime *runtime, struct plugin *plugin, const struct record *record,
                         struct found *found, struct attn_error *why)
{
    const struct attn_plugin said = {.abi_version = record->abi_version,
                                     .name = record->name,
                                     .version = record->version,
                                     .vendor = record->vendor};
    TRY_IF(record->name[0] != '\0', plugin_identify(runtime, plugin, &said, why));
    if (record->status != ATTN_OK) {
        return error_set(why, record->status, record->field, "%s", record->message);
    }
    struct arena arrays;
    arena_init(&arrays, &runtime->host);
    const struct attn_probe_sink sink = found_sink(found);
    bool whole = record_report(record, &sink, &arrays) && plugin->name[0] != '\0';
    bool failed = arrays.failed;
    arena_finish(&arrays);
    if (failed) {
        return no_memory(runtime);
    }
    if (!whole) {
        return error_set(why, ATTN_ERROR_PLUGIN, "probe", "its record is malformed");
    }
    attn_status status = found_status(found, why);
    if (status == ATTN_OK && record->message[0] != '\0') {
        found_note(found, record->field, record->message);
    }
    return status;
}

static struct isolated *isolated_of(const attn_runtime *runtime)
{
    return runtime->isolated;
}

static struct scan *scan_of(const attn_runtime *runtime, const struct plugin *plugin)
{
    return &isolated_of(runtime)->scans[plugin - runtime->plugins];
}

static struct probe_key key_of(const attn_runtime *runtime, const struct plugin *plugin)
{
    return (struct probe_key){isolated_of(runtime)->machine.state, plugin->probed};
}

static attn_status keep(attn_runtime *runtime, const struct plugin *plugin, attn_status status,
                        const struct found *found, struct attn_error *why)
{
    const struct record record = {.key = key_of(runtime, plugin),
                                  .file = plugin->file,
                                  .deadline_ms = runtime->settings.probe_deadline_ms,
                                  .status = status,
                                  .field = why->field,
                                  .message = why->message,
                                  .abi_version = plugin->abi_version,
                                  .name = plugin->name,
                                  .version = plugin->version,
                                  .vendor = plugin->vendor};
    struct text bytes;
    text_init(&bytes, &runtime->host);
    record_write(&bytes, &record, found);
    bool failed = bytes.failed;
    if (!failed) {
        cache_write(runtime, plugin->file, bytes.data, bytes.length);
    }
    text_finish(&bytes);
    return failed ? no_memory(runtime) : status;
}

/* What the cache says of a plugin: ATTN_ERROR_NOT_FOUND if nothing, and ATTN_ERROR_IO if there is
 * no file. The key is taken before the file is read. */
static attn_status consult(attn_runtime *runtime, struct plugin *plugin, struct answer *answer,
                           struct attn_error *why)
{
    struct stat info;
    if (stat(plugin->file, &info) != 0) {
        return error_set(why, ATTN_ERROR_IO, "file", "cannot be read: %s", strerror(errno));
    }
    file_id_set(&plugin->probed, &info);
    const struct probe_key key = key_of(runtime, plugin);
    return runtime->settings.isolation <= 0 ? cache_read(runtime, plugin->file, &key, answer)
                                            : ATTN_ERROR_NOT_FOUND;
}

/* The scanners of the plugins that come after this one and are unknown, too, run next to its own,
 * so that many that hang cost little more than one. What cannot be begun is tried again in its
 * turn.
 */
static void begin_others(attn_runtime *runtime, const struct plugin *plugin)
{
    int32_t running = 0;
    struct plugin *end = runtime->plugins + runtime->num_plugins;
    for (const struct plugin *other = runtime->plugins; other < end; other++) {
        running += scan_of(runtime, other)->running;
    }
    for (struct plugin *other = runtime->plugins + (plugin - runtime->plugins) + 1;
         other < end && running < MAX_SCANS; other++) {
        struct answer answer = {.bytes = NULL};
        struct attn_error why = ATTN_ERROR_INIT;
        if (other->status != ATTN_OK || scan_of(runtime, other)->running) {
            continue;
        }
        attn_status status = consult(runtime, other, &answer, &why);
        answer_finish(runtime, &answer);
        if (status == ATTN_ERROR_NOT_FOUND) {
            running += scan_begin(runtime, other->file, scan_of(runtime, other), &why) == ATTN_OK;
        }
    }
}

/* In a process of its own. *there: whether one could be had. */
static attn_status ask_apart(attn_runtime *runtime, struct plugin *plugin, struct found *found,
                             bool *there, struct attn_error *why)
{
    struct answer answer = {.bytes = NULL};
    struct scan *scan = scan_of(runtime, plugin);
    attn_status status = scan->running ? ATTN_OK : scan_begin(runtime, plugin->file, scan, why);
    if (status == ATTN_OK) {
        begin_others(runtime, plugin);
        status = scan_finish(runtime, scan, &answer, why);
    }
    *there = status != ATTN_ERROR_NOT_FOUND;
    status = status ? status : adopt(runtime, plugin, &answer.record, found, why);
    answer_finish(runtime, &answer);
    return status;
}

static attn_status ask_plugin(attn_runtime *runtime, struct plugin *plugin, struct found *found,
                              struct attn_error *why)
{
    bool there = false;
    if (runtime->settings.isolation < 0) {
        return ask(runtime, plugin, found, why);
    }
    attn_status status = ask_apart(runtime, plugin, found, &there, why);
    if (there) { /* or might be there the next time */
        return status;
    }
    if (runtime->settings.isolation > 0) {
        const struct attn_error cause = *why;
        return error_set(why, ATTN_ERROR_IO, "isolation", "ordered, and %s", cause.message);
    }
    runtime_log(runtime, ATTN_LOG_INFO, "%s is probed in this process: %s", plugin->file,
                why->message);
    return ask(runtime, plugin, found, why);
}

static attn_status examine(attn_runtime *runtime, struct plugin *plugin, struct found *found,
                           struct attn_error *why)
{
    struct answer answer = {.bytes = NULL};
    found_reset(found);
    attn_status status = scan_of(runtime, plugin)->running
                             ? ATTN_ERROR_NOT_FOUND /* begun next to another */
                             : consult(runtime, plugin, &answer, why);
    if (status == ATTN_OK) {
        const long long age = answer.age;
        status = adopt(runtime, plugin, &answer.record, found, why);
        answer_finish(runtime, &answer);
        const struct attn_error said = *why;
        return status == ATTN_OK ? status
                                 : error_set(why, status, said.field, "%s (of a probe %lld s ago)",
                                             said.message, age);
    }
    if (status != ATTN_ERROR_NOT_FOUND) {
        return status;
    }
    status = ask_plugin(runtime, plugin, found, why);
    /* Neither a lack of memory nor of a readable file says anything about the next start. */
    return status == ATTN_ERROR_OUT_OF_MEMORY || status == ATTN_ERROR_IO ||
                   runtime->settings.cache_dir[0] == '\0'
               ? status
               : keep(runtime, plugin, status, found, why);
}

static attn_status begin(attn_runtime *runtime, struct attn_error *error)
{
    struct isolated *isolated = arena_alloc(
        &runtime->arena, sizeof *isolated + (size_t)runtime->num_plugins * sizeof *isolated->scans);
    NO_MEMORY_IF(isolated == NULL, "runtime", "the probes");
    if (runtime->settings.cache_dir[0] != '\0') {
        isolated->machine = machine_read();
    }
    runtime->isolated = isolated;
    return ATTN_OK;
}

/* Where the enumeration has ended early some still run. */
static void end(attn_runtime *runtime)
{
    for (int32_t i = 0; runtime->isolated != NULL && i < runtime->num_plugins; i++) {
        scan_abandon(&isolated_of(runtime)->scans[i]);
    }
}

const struct isolation isolation = {begin, end, examine, cache_forget};
