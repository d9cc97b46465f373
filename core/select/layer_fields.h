/* SPDX-License-Identifier: Apache-2.0 */
/* Every field of a layer's description: which kinds take it, and the numbers that it may be. */
#ifndef CORE_SELECT_LAYER_FIELDS_H
#define CORE_SELECT_LAYER_FIELDS_H

#include "select/assignment.h"

/* A description whose kind takes its fields, each in its range, and no value without the switch
 * that it belongs to. An error names the layer, the first bad field, its value and what is allowed.
 */
attn_status layer_check_fields(const struct attn_layer_desc *layer, struct attn_error *error);

#endif
