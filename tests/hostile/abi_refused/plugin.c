/* SPDX-License-Identifier: Apache-2.0 */
/* Speaks a newer ABI only, and says so. */
#include "../common.h"

#include <string.h>

attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,
                              const struct attn_plugin **plugin, struct attn_error *error)
{
    static const char why[] = "speaks ABI 9.0 only";

    *plugin = NULL;
    if (error != NULL) {
        error->status = ATTN_ERROR_ABI_VERSION;
        memcpy(error->message, why, sizeof why);
    }
    return ATTN_ERROR_ABI_VERSION;
}
