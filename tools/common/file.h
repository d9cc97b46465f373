/* SPDX-License-Identifier: Apache-2.0 */
/* Files that a user names, whole. */
#ifndef TOOLS_COMMON_FILE_H
#define TOOLS_COMMON_FILE_H

#include <stddef.h>

/* All of a file or pipe of at most `most` bytes, and a NUL after them; the caller frees it. NULL:
 * *why says why not. */
char *read_whole_file(const char *name, size_t most, size_t *size, const char **why);

#endif
