/* SPDX-License-Identifier: Apache-2.0 */
/* Hardware that is not there: no defect, and not reported as one. */
#include "../common.h"

#include <string.h>

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    static const char why[] = "no such accelerator";

    if (error != NULL) {
        error->status = ATTN_ERROR_ABSENT;
        memcpy(error->message, why, sizeof why);
    }
    return ATTN_ERROR_ABSENT;
}

static const struct attn_plugin table = SOUND_TABLE("absent", probe);
SOUND_ENTRY(table)
