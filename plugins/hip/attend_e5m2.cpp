/* SPDX-License-Identifier: Apache-2.0 */
/* attend.h for caches of e5m2. */
#include "attend.h"

HIP_ATTEND_SHAPES(HIP_ATTEND_KERNEL, e5m2, E5M2)
