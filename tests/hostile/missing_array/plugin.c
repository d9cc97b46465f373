/* SPDX-License-Identifier: Apache-2.0 */
/* Counts head sizes and gives no array. */
#include "../common.h"

SOUND_BUT("missing_array", "missing_array", caps.head_sizes = NULL)
