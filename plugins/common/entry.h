/* SPDX-License-Identifier: Apache-2.0 */
#ifndef PLUGINS_COMMON_ENTRY_H
#define PLUGINS_COMMON_ENTRY_H

#include <attn/plugin.h>

#include "common/tensors.h"
#include "plugin_version.h"

/* The bit of a code in a mask of struct attn_backend_caps. */
#define BIT(code) (UINT64_C(1) << (code))

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

/* A plugin's table and its one exported symbol: the name of its backend and the functions of
 * struct attn_plugin. */
#define PLUGIN_ENTRY(name_, probe_, supports_, create_, destroy_)                                  \
    static const struct attn_plugin plugin_table = {                                               \
        .struct_size = sizeof plugin_table,                                                        \
        .abi_version = ATTN_ABI_VERSION,                                                           \
        .name = (name_),                                                                           \
        .version = PLUGIN_VERSION,                                                                 \
        .vendor = "libattn",                                                                       \
        .probe = (probe_),                                                                         \
        .supports = (supports_),                                                                   \
        .create = (create_),                                                                       \
        .destroy = (destroy_),                                                                     \
    };                                                                                             \
    attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,              \
                                  const struct attn_plugin **plugin, struct attn_error *error)     \
    {                                                                                              \
        return plugin_answer(&plugin_table, abi_version_min, abi_version_max, plugin, error);      \
    }

#endif
