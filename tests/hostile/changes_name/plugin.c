/* SPDX-License-Identifier: Apache-2.0 */
/* Another name the next time: what was cached of it does not hold. */
#include "../common.h"

#include <stdlib.h>

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    struct attn_backend_caps caps = sound_caps("changes_name");

    return sound_report(sink, &caps);
}

static const struct attn_plugin first = SOUND_TABLE("first_name", probe);
static const struct attn_plugin second = SOUND_TABLE("second_name", probe);

attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,
                              const struct attn_plugin **plugin, struct attn_error *error)
{
    *plugin = getenv("HOSTILE_SECOND") != NULL ? &second : &first;
    return ATTN_OK;
}
