/* SPDX-License-Identifier: Apache-2.0 */
/* Reports a backend name that the plugin without a defect has. */
#include "../common.h"

SOUND_BUT("second_sound", "sound", (void)0)
