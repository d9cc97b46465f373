/* SPDX-License-Identifier: Apache-2.0 */
/* Prefers a layout that it does not read. */
#include "../common.h"

SOUND_BUT("preferred_layout", "preferred_layout", caps.preferred_layout = ATTN_KV_LAYOUT_HND)
