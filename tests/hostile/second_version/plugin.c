/* SPDX-License-Identifier: Apache-2.0 */
/* A newer version of the plugin without a defect: same plugin, same backend. */
#include "../common.h"

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    struct attn_backend_caps caps = sound_caps("sound");

    caps.version = "2.0";
    return sound_report(sink, &caps);
}

static const struct attn_plugin table = {.struct_size = sizeof table,
                                         .abi_version = ATTN_ABI_VERSION,
                                         .name = "sound",
                                         .version = "2.0",
                                         .vendor = "tests",
                                         .probe = probe,
                                         .create = sound_create,
                                         .destroy = sound_destroy};
SOUND_ENTRY(table)
