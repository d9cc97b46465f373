/* SPDX-License-Identifier: Apache-2.0 */
/* Reports a backend name that the plugin without a defect has. */
#include "../common.h"

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    struct attn_backend_caps caps = sound_caps("sound");

    (void)host, (void)error;

    return sound_report(sink, &caps);
}

static const struct attn_plugin table = SOUND_TABLE("second_sound", probe);
SOUND_ENTRY(table)
