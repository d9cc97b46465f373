/* SPDX-License-Identifier: Apache-2.0 */
#ifndef PLUGINS_COMMON_ENTRY_H
#define PLUGINS_COMMON_ENTRY_H

#include <attn/plugin.h>

#include "common/tensors.h"

/* Where a plugin has no options of its own: names the first one. */
static inline attn_status plugin_refuse_option(const struct attn_create_args *args,
                                               struct attn_error *error)
{
    return plugin_error(error, ATTN_ERROR_NOT_FOUND, "options",
                        "'%s' is not an option of %s, which has none", args->options[0],
                        args->backend);
}

/* What attn_plugin_entry answers: the plugin's one table, or which versions it speaks. */
static inline attn_status plugin_answer(const struct attn_plugin *table, uint32_t abi_version_min,
                                        uint32_t abi_version_max, const struct attn_plugin **plugin,
                                        struct attn_error *error)
{
    *plugin = NULL;
    if (!ATTN_VERSION_SERVES(abi_version_min, abi_version_max)) {
        return plugin_error(
            error, ATTN_ERROR_ABI_VERSION, "abi_version",
            "%u.%u to %u.%u was asked; %s speaks %u.%u to %u.%u",
            ATTN_VERSION_MAJOR(abi_version_min), ATTN_VERSION_MINOR(abi_version_min),
            ATTN_VERSION_MAJOR(abi_version_max), ATTN_VERSION_MINOR(abi_version_max), table->name,
            ATTN_VERSION_MAJOR(ATTN_ABI_VERSION_MIN), ATTN_VERSION_MINOR(ATTN_ABI_VERSION_MIN),
            ATTN_VERSION_MAJOR(ATTN_ABI_VERSION), ATTN_VERSION_MINOR(ATTN_ABI_VERSION));
    }
    *plugin = table;
    return ATTN_OK;
}

#endif
