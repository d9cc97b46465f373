/* SPDX-License-Identifier: Apache-2.0 */
/* attend.h for caches of f16. */
#include "attend.h"

HIP_ATTEND_SHAPES(HIP_ATTEND_KERNEL, f16, F16)
