/* SPDX-License-Identifier: Apache-2.0 */
/* From a caller's layer description to a complete one. */
#ifndef CORE_SELECT_LAYER_CHECK_H
#define CORE_SELECT_LAYER_CHECK_H

#include "select/assignment.h"

/* Reads, checks and completes description `index` of the model; `layers` holds the ones before it.
 * block_size may stay 0: selection chooses it. Errors name the layer, the field, its value and what
 * is allowed. */
attn_status layer_resolve(struct arena *arena, const struct attn_layer_desc *desc, int32_t index,
                          const struct assignment_layer *layers, struct layer *layer,
                          struct attn_error *error);

/* Whether two layers have one KV specification, block_size included. */
bool layer_same_cache(const struct layer *a, const struct layer *b);

#endif
