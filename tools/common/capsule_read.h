/* SPDX-License-Identifier: Apache-2.0 */
/* Reading what the core has recorded. */
#ifndef TOOLS_COMMON_CAPSULE_READ_H
#define TOOLS_COMMON_CAPSULE_READ_H

#include "host/capsule.h"

/* Reads a file's bytes. NULL, with *data where the tensors begin, or why it is no capsule: then
 * `why`, of `size` bytes, names the line, its value and what was allowed. */
const char *capsule_read(struct capsule *capsule, const char *bytes, size_t length,
                         const char **data, char *why, size_t size);

#endif
