/* SPDX-License-Identifier: Apache-2.0 */
/* A plugin that speaks to everybody: the mutants behind an entry which takes any range of versions.
 */
#include <attn/plugin.h>
#include <dlfcn.h>
#include <string.h>

attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,
                              const struct attn_plugin **plugin, struct attn_error *error)
{
    attn_plugin_entry_fn *entry;
    void *library = dlopen(MUTANTS_FILE, RTLD_NOW | RTLD_LOCAL);
    void *symbol = library != NULL ? dlsym(library, ATTN_PLUGIN_ENTRY_SYMBOL) : NULL;
    if (symbol == NULL) {
        return ATTN_ERROR_PLUGIN;
    }
    memcpy(&entry, &symbol, sizeof entry);
    return entry(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, plugin, error);
}
