/* SPDX-License-Identifier: Apache-2.0 */
/* attend.h for caches of bf16. */
#include "attend.h"

HIP_ATTEND_SHAPES(HIP_ATTEND_KERNEL, bf16, BF16)
