/* SPDX-License-Identifier: Apache-2.0 */
/* Calls a function that no library has. */
#include "../common.h"

attn_status no_such_function(void);

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    struct attn_backend_caps caps = sound_caps("undefined_symbol");

    return host->num_threads == 77 ? no_such_function() : sound_report(sink, &caps);
}

static const struct attn_plugin table = SOUND_TABLE("undefined_symbol", probe);
SOUND_ENTRY(table)
