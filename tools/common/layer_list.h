/* SPDX-License-Identifier: Apache-2.0 */
/* Equal layers of a model as one line of a table. */
#ifndef TOOLS_COMMON_LAYER_LIST_H
#define TOOLS_COMMON_LAYER_LIST_H

#include <stddef.h>
#include <stdint.h>

/* Writes "0-11", "0, 2 ... 40" or "0-4, 6-10" for increasing indices; what does not fit is left
 * out, and "..." stands for it. Size: at least 32. */
void layer_list(const int32_t *indices, int32_t count, char *text, size_t size);

#endif
