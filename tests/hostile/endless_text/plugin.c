/* SPDX-License-Identifier: Apache-2.0 */
/* Fills the error's text to the last byte and leaves no NUL. */
#include "../common.h"

#include <string.h>

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    if (error != NULL) {
        error->status = ATTN_ERROR_DEVICE;
        memset(error->field, 'f', sizeof error->field);
        memset(error->message, 'm', sizeof error->message);
    }
    return ATTN_ERROR_DEVICE;
}

static const struct attn_plugin table = SOUND_TABLE("endless_text", probe);
SOUND_ENTRY(table)
