/* SPDX-License-Identifier: Apache-2.0 */
/* What a backend declares, held to a committed list that it may exceed but not fall short of. */
#ifndef CHECK_DECLARED_H
#define CHECK_DECLARED_H

#include <stdbool.h>

#include "common/declared.h"

/* Writes the first thing of the list in `file` that is not declared (any more), or why the file
 * cannot be read, into `why`; false then. */
bool declared_holds(const struct attn_backend_caps *caps, const char *file, char *why, size_t size);

#endif
