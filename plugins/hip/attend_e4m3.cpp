/* SPDX-License-Identifier: Apache-2.0 */
/* attend.h for caches of e4m3. */
#include "attend.h"

HIP_ATTEND_SHAPES(HIP_ATTEND_KERNEL, e4m3, E4M3)
