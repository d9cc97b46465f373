/* SPDX-License-Identifier: Apache-2.0 */
/* Capabilities with an absurd struct_size. */
#include "../common.h"

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    struct attn_backend_caps caps = sound_caps("caps_size_lies");

    (void)host, (void)error;
    caps.struct_size = SIZE_MAX;
    return sound_report(sink, &caps);
}

static const struct attn_plugin table = SOUND_TABLE("caps_size_lies", probe);
SOUND_ENTRY(table)
