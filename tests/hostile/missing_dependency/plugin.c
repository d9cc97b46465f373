/* SPDX-License-Identifier: Apache-2.0 */
/* Is linked to a vendor's library that is not on this machine. */
#include "../common.h"

int driver_version(void);

SOUND_BUT("missing_dependency", "missing_dependency", caps.rank[0] = driver_version())
