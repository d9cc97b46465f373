/* SPDX-License-Identifier: Apache-2.0 */
/* attend.h for caches and queries of e4m3. */
#include "attend.h"

#if defined(MATRIX_CODES)
HIP_ATTEND_SHAPES(HIP_ATTEND_KERNEL, fp8, FP8)
#endif
