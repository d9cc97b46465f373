/* SPDX-License-Identifier: Apache-2.0 */
/* attend.h for caches of int8. */
#include "attend.h"

HIP_ATTEND_SHAPES(HIP_ATTEND_KERNEL, int8, INT8)
