/* SPDX-License-Identifier: Apache-2.0 */
/* Answers with a version that was not offered. */
#include "../common.h"

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    return ATTN_OK;
}

static const struct attn_plugin table = {.struct_size = sizeof table,
                                         .abi_version = ATTN_MAKE_VERSION(9, 0),
                                         .name = "abi_too_new",
                                         .version = "1.0",
                                         .vendor = "tests",
                                         .probe = probe,
                                         .create = sound_create,
                                         .destroy = sound_destroy};
SOUND_ENTRY(table)
