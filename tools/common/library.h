/* SPDX-License-Identifier: Apache-2.0 */
/* How a tool finds the core: next to itself in a build tree, else where it was installed, else by
 * soname. */
#ifndef TOOLS_COMMON_LIBRARY_H
#define TOOLS_COMMON_LIBRARY_H

#include <attn/api.h>

/* Opens libattn.so.1 once; the table lives as long as the process. */
attn_status library_open(const struct attn_api **api, struct attn_error *error);

#endif
