/* SPDX-License-Identifier: Apache-2.0 */
/* Its probe says that there is no memory, while the engine has plenty. */
#include "../common.h"

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    return ATTN_ERROR_OUT_OF_MEMORY;
}

static const struct attn_plugin table = SOUND_TABLE("claims_no_memory", probe);
SOUND_ENTRY(table)
