/* SPDX-License-Identifier: Apache-2.0 */
/* No defect: the others differ from this one. */
#include "../common.h"

SOUND_BUT("sound", "sound", (void)0)
