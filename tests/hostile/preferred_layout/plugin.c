/* SPDX-License-Identifier: Apache-2.0 */
/* Prefers a layout that it does not walk. */
#include "../common.h"

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    struct attn_backend_caps caps = sound_caps("preferred_layout");

    (void)host, (void)error;
    caps.preferred_layout = ATTN_KV_LAYOUT_HND;
    return sound_report(sink, &caps);
}

static const struct attn_plugin table = SOUND_TABLE("preferred_layout", probe);
SOUND_ENTRY(table)
