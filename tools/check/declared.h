/* SPDX-License-Identifier: Apache-2.0 */
/* What a backend declares, by name: as JSON, and held to a committed list that it may exceed but
 * not fall short of. */
#ifndef CHECK_DECLARED_H
#define CHECK_DECLARED_H

#include <attn/capability.h>
#include <stdbool.h>

#include "common/json.h"

/* {"terms": ["causal", …], "head_sizes": [{"qk": [8, 512, 8], …}], "graph_level": 3, …}; NULL when
 * there is no memory. */
struct json *declared_json(const struct attn_backend_caps *caps);
/* Writes the first thing of the list in `file` that is not declared (any more), or why the file
 * cannot be read, into `why`; false then. */
bool declared_holds(const struct attn_backend_caps *caps, const char *file, char *why, size_t size);

#endif
