/* SPDX-License-Identifier: Apache-2.0 */
/* What the ready tables have in common. */
#ifndef COLLECTIVES_TABLE_H
#define COLLECTIVES_TABLE_H

#include <attn/collectives.h>
#include <stdio.h>

static inline attn_status table_refuse(struct attn_error *error, attn_status status,
                                       const char *field, const char *message)
{
    if (error != NULL && error->struct_size >= sizeof *error) {
        error->status = status;
        snprintf(error->field, sizeof error->field, "%s", field);
        snprintf(error->message, sizeof error->message, "%s", message);
    }
    return status;
}

#endif
