/* SPDX-License-Identifier: Apache-2.0 */
/* A sound plugin on device 0 of TYPE, in NAMESPACE (NULL: its own). */
#include "../hostile/common.h"

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    struct attn_device_info info = sound_device();
    struct attn_backend_caps caps = sound_caps(NAME);
    info.device.type = caps.device.type = TYPE;
    info.device_namespace = NAMESPACE;
    const attn_status status = sink->device(sink->user, &info, error);
    return status != ATTN_OK ? status : sink->backend(sink->user, &caps, error);
}

static const struct attn_plugin table = SOUND_TABLE(NAME, probe);
SOUND_ENTRY(table)
