/* SPDX-License-Identifier: Apache-2.0 */
/* From a file to a plugin's table. */
#ifndef CORE_RUNTIME_LOAD_H
#define CORE_RUNTIME_LOAD_H

#include "runtime/runtime.h"

/* dlopen, entry, negotiation and a check of the table, once. The first time name, version and
 * vendor are copied; a plugin that was taken from a record has to say the same again, from the same
 * file. Never dlclosed once the entry has answered. Not thread-safe: under runtime->lock, or before
 * the runtime is shared. */
attn_status plugin_load(attn_runtime *runtime, struct plugin *plugin, struct attn_error *error);

/* Refuses a file that others could have put, or may put, where it lies. */
attn_status plugin_check_place(const char *file, struct attn_error *error);

/* Checks ABI version, name, version and vendor of a table and copies them, before the runtime is
 * shared. */
attn_status plugin_identify(attn_runtime *runtime, struct plugin *plugin,
                            const struct attn_plugin *table, struct attn_error *error);

#endif
