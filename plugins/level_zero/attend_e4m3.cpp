/* SPDX-License-Identifier: Apache-2.0 */
/* attend.h for caches of fp8_e4m3. */
#include "attend.h"

LEVEL_ZERO_SHAPES(LEVEL_ZERO_ATTEND_KERNEL, e4m3, FP8_E4M3)
