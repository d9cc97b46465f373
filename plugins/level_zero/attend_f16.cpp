/* SPDX-License-Identifier: Apache-2.0 */
/* attend.h for caches of f16. */
#include "attend.h"

LEVEL_ZERO_SHAPES(LEVEL_ZERO_ATTEND_KERNEL, f16, F16)
