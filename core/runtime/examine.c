/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/examine.h"

#include <errno.h>
#include <string.h>

#include "runtime/load.h"
#include "runtime/probe_cache.h"
#include "runtime/scan.h"
#include "util/error.h"
#include "util/text.h"

static attn_status no_memory(attn_runtime *runtime, struct attn_error *why)
{
    runtime->arena.failed = true;
    return error_set(why, ATTN_ERROR_OUT_OF_MEMORY, "plugin",
                     "no memory for the record of its probe");
}

/* In this process. */
static attn_status ask(attn_runtime *runtime, struct plugin *plugin, struct found *found,
                       struct attn_error *why)
{
    attn_status status = plugin_load(runtime, plugin, why);
    if (status != ATTN_OK) {
        return status;
    }
    runtime_stage(runtime, plugin->file, 'P');
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
    if (record->name[0] != '\0') {
        attn_status status = plugin_identify(runtime, plugin, &said, why);
        if (status != ATTN_OK) {
            return status;
        }
    }
    if (record->status != ATTN_OK) {
        return error_set(why, record->status, record->field, "%s", record->message);
    }
    struct arena scratch;
    arena_init(&scratch, &runtime->host);
    const struct attn_probe_sink sink = found_sink(found);
    bool whole = record_report(record, &sink, &scratch) && plugin->name[0] != '\0';
    bool failed = scratch.failed;
    arena_finish(&scratch);
    if (failed) {
        return no_memory(runtime, why);
    }
    if (!whole) {
        return error_set(why, ATTN_ERROR_PLUGIN, "probe", "its record is malformed");
    }
    return found_status(found, why);
}

static attn_status keep(attn_runtime *runtime, const struct plugin *plugin, attn_status status,
                        const struct found *found, struct attn_error *why)
{
    const struct record record = {.key = plugin->key,
                                  .file = plugin->file,
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
    return failed ? no_memory(runtime, why) : status;
}

/* In a process of its own. *there: whether one could be had. */
static attn_status ask_apart(attn_runtime *runtime, struct plugin *plugin, struct found *found,
                             bool *there, struct attn_error *why)
{
    struct text answer;
    struct record record;
    size_t at = 0;
    text_init(&answer, &runtime->host);
    attn_status status = scan_plugin(runtime, plugin->file, &answer, &at, why);
    *there = status != ATTN_ERROR_NOT_FOUND;
    if (answer.failed) {
        status = no_memory(runtime, why);
    } else if (status == ATTN_OK) {
        const char *wrong =
            record_read(&record, (const unsigned char *)answer.data + at, answer.length - at);
        status = wrong != NULL
                     ? error_set(why, ATTN_ERROR_PLUGIN, "scan", "what its process sent %s", wrong)
                     : adopt(runtime, plugin, &record, found, why);
    }
    text_finish(&answer);
    return status;
}

static attn_status ask_anew(attn_runtime *runtime, struct plugin *plugin, struct found *found,
                            struct attn_error *why)
{
    bool there = false;
    if (runtime->settings.isolation < 0) {
        return ask(runtime, plugin, found, why);
    }
    attn_status status = ask_apart(runtime, plugin, found, &there, why);
    if (there) {
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

attn_status plugin_examine(attn_runtime *runtime, struct plugin *plugin, struct found *found,
                           struct attn_error *why)
{
    struct stat info;
    struct cache_entry entry;
    attn_status status = ATTN_ERROR_NOT_FOUND;
    found_reset(found);
    if (stat(plugin->file, &info) != 0) {
        return error_set(why, ATTN_ERROR_IO, "file", "cannot be read: %s", strerror(errno));
    }
    probe_key_set(&plugin->key, &runtime->machine, &info);
    if (runtime->settings.isolation <= 0) {
        status = cache_read(runtime, plugin->file, &plugin->key, &entry);
    }
    if (status == ATTN_OK) {
        status = adopt(runtime, plugin, &entry.record, found, why);
        cache_entry_finish(runtime, &entry);
        return status;
    }
    if (status == ATTN_ERROR_OUT_OF_MEMORY) {
        return no_memory(runtime, why);
    }
    status = ask_anew(runtime, plugin, found, why);
    /* Neither a lack of memory nor of a readable file says anything about the next start. */
    return status == ATTN_ERROR_OUT_OF_MEMORY || status == ATTN_ERROR_IO ||
                   runtime->settings.cache_dir[0] == '\0'
               ? status
               : keep(runtime, plugin, status, found, why);
}
