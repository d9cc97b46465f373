/* SPDX-License-Identifier: Apache-2.0 */
/* Counts head sizes and gives no array. */
#include "../common.h"

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    struct attn_backend_caps caps = sound_caps("missing_array");

    (void)host, (void)error;
    caps.head_sizes = NULL;
    return sound_report(sink, &caps);
}

static const struct attn_plugin table = SOUND_TABLE("missing_array", probe);
SOUND_ENTRY(table)
