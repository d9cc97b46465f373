/* SPDX-License-Identifier: Apache-2.0 */
/* Declares a term that this ABI does not have. */
#include "../common.h"

SOUND_BUT("unknown_bits", "unknown_bits", caps.terms |= UINT64_C(1) << 40)
