/* SPDX-License-Identifier: Apache-2.0 */
/* A backend name outside [a-z][a-z0-9_]*. */
#include "../common.h"

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    struct attn_backend_caps caps = sound_caps("Not A Name");

    (void)host, (void)error;

    return sound_report(sink, &caps);
}

static const struct attn_plugin table = SOUND_TABLE("bad_backend_name", probe);
SOUND_ENTRY(table)
