/* SPDX-License-Identifier: Apache-2.0 */
/* From a file to a plugin's table. */
#ifndef CORE_RUNTIME_LOAD_H
#define CORE_RUNTIME_LOAD_H

#include "runtime/runtime.h"

/* dlopen, entry, negotiation and a check of the table, once; name, version and vendor are copied. Never dlclosed once
 * the entry has answered. Not thread-safe: under runtime->lock, or before the runtime is shared. */
attn_status plugin_load(attn_runtime *runtime, struct plugin *plugin, struct attn_error *error);

#endif
