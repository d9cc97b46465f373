/* SPDX-License-Identifier: Apache-2.0 */
/* From a file to what it offers: what is on file about it, else what its code says. */
#ifndef CORE_RUNTIME_EXAMINE_H
#define CORE_RUNTIME_EXAMINE_H

#include "runtime/probe.h"

/* Fills the plugin's names and `found`, or says why the plugin is refused. The plugin is loaded
 * only if nothing on file answers for it. arena.failed tells our own lack of memory from a
 * plugin's. */
attn_status plugin_examine(attn_runtime *runtime, struct plugin *plugin, struct found *found,
                           struct attn_error *why);

#endif
