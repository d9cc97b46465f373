/* SPDX-License-Identifier: Apache-2.0 */
/* A required slot is NULL: probe, or the one that HOSTILE_SLOT names. */
#include <stdlib.h>
#include <string.h>

#include "../common.h"

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    const struct attn_backend_caps caps = sound_caps("null_slot");
    (void)host, (void)error;
    return sound_report(sink, &caps);
}

static struct attn_plugin table = SOUND_TABLE("null_slot", NULL);

attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,
                              const struct attn_plugin **plugin, struct attn_error *error)
{
    const char *slot = getenv("HOSTILE_SLOT");
    (void)abi_version_min, (void)abi_version_max, (void)error;
    table.probe = slot != NULL && strcmp(slot, "probe") != 0 ? probe : NULL;
    table.create = slot != NULL && strcmp(slot, "create") == 0 ? NULL : sound_create;
    table.destroy = slot != NULL && strcmp(slot, "destroy") == 0 ? NULL : sound_destroy;
    *plugin = &table;
    return ATTN_OK;
}
