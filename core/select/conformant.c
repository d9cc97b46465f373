/* SPDX-License-Identifier: Apache-2.0 */
#include "select/conformant.h"

#include "host/conformance.h"
#include "select/lines.h"
#include "util/hash.h"

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
