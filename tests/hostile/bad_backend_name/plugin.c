/* SPDX-License-Identifier: Apache-2.0 */
/* A backend name outside [a-z][a-z0-9_]*. */
#include "../common.h"

SOUND_BUT("bad_backend_name", "Not A Name", (void)0)
