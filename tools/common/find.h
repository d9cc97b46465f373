/* SPDX-License-Identifier: Apache-2.0 */
/* A backend of a runtime by its name, or why it is not there. */
#ifndef TOOLS_COMMON_FIND_H
#define TOOLS_COMMON_FIND_H

#include <attn/api.h>
#include <stdbool.h>

/* Does "name" or "name@variant" mean these caps? */
bool backend_is_named(const struct attn_backend_caps *caps, const char *name);
/* "name" or "name@variant". */
void backend_text(const struct attn_backend_caps *caps, char *text, size_t size);
/* The index of the first backend that fits; -1 with the error filled: ATTN_ERROR_ABSENT where its
 * hardware is missing, what is wrong with its plugin, or that no backend has the name. */
int32_t backend_find(const struct attn_api *api, const attn_runtime *runtime, const char *name,
                     struct attn_error *error);

#endif
