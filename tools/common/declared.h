/* SPDX-License-Identifier: Apache-2.0 */
/* What a backend declares, by name, as JSON. */
#ifndef TOOLS_COMMON_DECLARED_H
#define TOOLS_COMMON_DECLARED_H

#include <attn/capability.h>

#include "common/json.h"

/* {"terms": ["causal", …], "head_sizes": [{"qk": [8, 512, 8], …}], "graph_level": 64, …}; NULL when
 * there is no memory. */
struct json *declared_json(const struct attn_backend_caps *caps);

#endif
