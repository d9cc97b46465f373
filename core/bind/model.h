/* SPDX-License-Identifier: Apache-2.0 */
/* The bind room's slots of struct attn_api; naming rule in select/select.h. Meanings stand in
 * attn/api.h. */
#ifndef CORE_BIND_MODEL_H
#define CORE_BIND_MODEL_H

#include <attn/api.h>

#include "select/assignment.h"
#include "util/slots.h"

SLOT(model_create);
SLOT(model_destroy);
SLOT(model_layer);
SLOT(model_num_groups);
SLOT(model_group);
SLOT(layer_group);
SLOT(layer_bind_params);
SLOT(layer_amax);
SLOT(layer_num_caches);
SLOT(layer_cache_spec);
SLOT(layer_cache_view);
SLOT(layer_bind_caches);
SLOT(layer_bind_memory);
SLOT(copy_blocks);

#endif
