/* SPDX-License-Identifier: Apache-2.0 */
/* From a file to a plugin's table. */
#ifndef CORE_RUNTIME_LOAD_H
#define CORE_RUNTIME_LOAD_H

#include <limits.h>

#include "runtime/runtime.h"

struct stat;

/* dlopen, entry, negotiation and a check of the table, once. The first time name, version and
 * vendor are copied; a plugin that was taken from a record has to say the same again, from the same
 * file. Never dlclosed once the entry has answered. Not thread-safe: under runtime->lock, or before
 * the runtime is shared. */
attn_status plugin_load(attn_runtime *runtime, struct plugin *plugin, struct attn_error *error);

void file_id_set(struct file_id *id, const struct stat *info);
bool file_id_same(const struct file_id *a, const struct file_id *b);

/* Refuses a file that others could have put, or may put, where it lies. */
attn_status plugin_check_place(const char *file, struct attn_error *error);

/* Checks ABI version, name, version and vendor of a table and copies them, before the runtime is
 * shared. */
attn_status plugin_identify(attn_runtime *runtime, struct plugin *plugin,
                            const struct attn_plugin *table, struct attn_error *error);

/* Fills runtime->plugins: ATTN_PLUGIN_PATH's entries in order, then the installed directory, or the
 * build tree's when the core itself lies in one. Each directory's attn_*.so, sorted. Entries that
 * are not absolute are kept with their reason. A file is taken once, 256 at most, of which
 * ATTN_PLUGIN_PATH gets 192: a crowded folder there does not displace the installed plugins.
 * runtime->searched says what was looked at. */
attn_status plugins_discover(attn_runtime *runtime, struct attn_error *error);

/* The file of this library, by whatever name it was opened. False: that is not known. */
bool core_file(char path[PATH_MAX]);
/* The folder of this library, or, if it lies in a build tree, that tree's. False as above. */
bool core_place(char folder[PATH_MAX], bool *build_tree);

#endif
