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
    attn_status status; /* why the first item was left out */
    struct attn_error error;
};

/* Room for one plugin's report, used again for the next. */
attn_status found_init(struct found *found, struct arena *arena, struct attn_error *error);
void found_reset(struct found *found);
/* Checks and copies what is put into it. */
struct attn_probe_sink found_sink(struct found *found);
/* ATTN_OK if a backend is left, on a device that was reported; else why the first was left out. */
attn_status found_status(struct found *found, struct attn_error *error);
/* Puts back, from a record, why an item was left out. */
void found_note(struct found *found, const char *field, const char *message);

/* Asks the plugin's probe. A backend whose report contradicts itself is left out. */
attn_status plugin_probe(const struct attn_host *host, const struct attn_plugin *table,
                         struct found *found, struct attn_error *error);

/* Takes bits that are not known out of all masks. */
void caps_trim(struct attn_backend_caps *caps);
/* Row `at` without unknown bits of what it is of. False: a layer that it refuses cannot be
 * described here. */
bool refused_read(const struct attn_backend_caps *caps, int32_t at,
                  struct attn_refused_combination *row);

/* Is the value in one of the ranges? */
bool range_holds(const struct attn_range *ranges, int32_t count, int32_t value);

/* Element `at` of vendor_codes that have passed caps_check. */
const struct attn_vendor_code *vendor_code_at(const struct attn_backend_caps *caps, int32_t at);

/* `variant` is not NULL; extensions have passed ext_check. */
attn_status caps_check(const struct attn_backend_caps *caps, struct attn_error *error);

attn_status device_check(const struct attn_device_info *device, struct attn_error *error);

#endif
