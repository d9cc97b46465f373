/* SPDX-License-Identifier: Apache-2.0 */
/* Is linked to a vendor's library that is not on this machine. */
#include "../common.h"

int driver_version(void);

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    struct attn_backend_caps caps = sound_caps("missing_dependency");

    (void)host, (void)error;
    caps.rank[0] = driver_version();
    return sound_report(sink, &caps);
}

static const struct attn_plugin table = SOUND_TABLE("missing_dependency", probe);
SOUND_ENTRY(table)
