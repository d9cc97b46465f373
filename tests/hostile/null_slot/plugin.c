/* SPDX-License-Identifier: Apache-2.0 */
/* A required slot is NULL. */
#include "../common.h"

static const struct attn_plugin table = SOUND_TABLE("null_slot", NULL);
SOUND_ENTRY(table)
