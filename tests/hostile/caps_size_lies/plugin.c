/* SPDX-License-Identifier: Apache-2.0 */
/* Capabilities with an absurd struct_size. */
#include "../common.h"

SOUND_BUT("caps_size_lies", "caps_size_lies", caps.struct_size = SIZE_MAX)
