/* SPDX-License-Identifier: Apache-2.0 */
/* What a plugin reports: checked and copied. */
#ifndef CORE_RUNTIME_PROBE_H
#define CORE_RUNTIME_PROBE_H

#include "runtime/runtime.h"

/* Devices and backends of one plugin as they are collected; everything in the arena. */
struct found {
    struct arena *arena;
    struct attn_device_info *devices;
    int32_t num_devices;
    struct backend *backends;
    int32_t num_backends;
    attn_status status; /* of the first item that was refused */
    struct attn_error error;
};

/* Room for one plugin's report, used again for the next. */
attn_status found_init(struct found *found, struct arena *arena, struct attn_error *error);
void found_reset(struct found *found);
/* Checks and copies what is put into it. */
struct attn_probe_sink found_sink(struct found *found);
/* Of the first item that was refused, or of the whole: backends on devices that were reported, one
 * at least. */
attn_status found_status(const struct found *found, struct attn_error *error);

/* Asks the plugin's probe. A contradiction in what it says refuses the plugin as a whole. */
attn_status plugin_probe(const struct attn_host *host, const struct attn_plugin *table,
                         struct found *found, struct attn_error *error);

#endif
