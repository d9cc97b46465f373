/* SPDX-License-Identifier: Apache-2.0 */
/* Declares a term that this ABI does not have. */
#include "../common.h"

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    struct attn_backend_caps caps = sound_caps("unknown_bits");

    (void)host, (void)error;
    caps.terms |= UINT64_C(1) << 40;
    return sound_report(sink, &caps);
}

static const struct attn_plugin table = SOUND_TABLE("unknown_bits", probe);
SOUND_ENTRY(table)
