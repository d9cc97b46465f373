/* SPDX-License-Identifier: Apache-2.0 */
/* attn-info's --layouts: the id of each layer's cache layout. */
#ifndef TOOLS_INFO_LAYOUTS_H
#define TOOLS_INFO_LAYOUTS_H

#include <attn/api.h>

#include "common/json.h"
#include "common/model_config.h"

/* Binds the assignment with memory of two blocks and adds `layout_id` and `layout` (the lines that
 * the id is a hash of) to each of `layers`, empty where a layer has no cache of its own. */
attn_status layouts_add(const struct attn_api *api, attn_runtime *runtime,
                        const attn_assignment *assignment, struct attn_device device,
                        const struct model_config *config, struct json *layers,
                        struct attn_error *error);

#endif
