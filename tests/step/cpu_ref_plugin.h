/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_ref's plugin, from its file, for backends that change some of it. */
#ifndef STEP_CPU_REF_PLUGIN_H
#define STEP_CPU_REF_PLUGIN_H

#include <attn/plugin.h>
#include <dlfcn.h>
#include <string.h>

static inline attn_status cpu_ref_plugin(uint32_t abi_version_min, uint32_t abi_version_max,
                                         const struct attn_plugin **plugin,
                                         struct attn_error *error)
{
    attn_plugin_entry_fn *entry = NULL;
    void *library = dlopen(CPU_REF_FILE, RTLD_NOW | RTLD_LOCAL);
    void *symbol = library != NULL ? dlsym(library, ATTN_PLUGIN_ENTRY_SYMBOL) : NULL;
    if (symbol == NULL) {
        return ATTN_ERROR_ABSENT;
    }
    memcpy(&entry, &symbol, sizeof entry);
    return entry(abi_version_min, abi_version_max, plugin, error);
}

#endif
