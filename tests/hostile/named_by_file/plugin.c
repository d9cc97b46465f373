/* SPDX-License-Identifier: Apache-2.0 */
/* No defect: attn_NAME.so is the plugin and the backend NAME, so that copies make many plugins. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

#include "../common.h"

static char name[64];

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    struct attn_backend_caps caps = sound_caps(name);

    return sound_report(sink, &caps);
}

static const struct attn_plugin table = SOUND_TABLE(name, probe);

attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,
                              const struct attn_plugin **plugin, struct attn_error *error)
{
    Dl_info info;

    if (dladdr(name, &info) != 0) {
        const char *from = strrchr(info.dli_fname, '/') + sizeof "attn_";

        strncpy(name, from, sizeof name - 1);
        name[strcspn(name, ".")] = '\0';
    }
    *plugin = &table;
    return ATTN_OK;
}
