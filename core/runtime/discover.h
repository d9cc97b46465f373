/* SPDX-License-Identifier: Apache-2.0 */
/* Which files may be plugins. */
#ifndef CORE_RUNTIME_DISCOVER_H
#define CORE_RUNTIME_DISCOVER_H

#include <limits.h>

#include "runtime/runtime.h"

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
