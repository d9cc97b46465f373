/* SPDX-License-Identifier: Apache-2.0 */
/* The backend under test as an engine meets it: found, chosen and run by the core, through the
 * public table alone. */
#ifndef CHECK_CORE_H
#define CHECK_CORE_H

#include <attn/api.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "harness/backend.h"

struct core {
    const struct attn_api *api;
    attn_runtime *runtime;
    struct attn_host host;                /* counts; the rest is the core's own */
    const struct attn_backend_caps *caps; /* the core's copy */
    struct attn_device device;
    char order[160]; /* "name@variant" */
};

/* A runtime with two plugins, the tested one and cpu_ref, that reads nothing of the environment. */
attn_status core_open(struct core *core, const struct resolved *resolved,
                      const struct attn_backend_caps *tested, struct attn_error *error);
void core_close(struct core *core);
/* The same core with cpu_ref ordered instead; it ends with `core`. */
struct core core_of_reference(const struct core *core);
/* Options of a selection with the backend ordered; they borrow from `core`. */
struct attn_select_options core_options(const struct core *core);
/* Whether the core serves a layer with the ordered backend, by itself or as a composition. */
bool core_serves(const struct core *core, const struct attn_layer_desc *layer);

#endif
