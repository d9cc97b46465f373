/* SPDX-License-Identifier: Apache-2.0 */
/* attend.h for caches of int8. */
#include "attend.h"

LEVEL_ZERO_SHAPES(LEVEL_ZERO_ATTEND_KERNEL, int8, INT8)
