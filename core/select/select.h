/* SPDX-License-Identifier: Apache-2.0 */
/* The select room's slots of struct attn_api. Naming rule of all rooms: a slot's function has the
 * slot's own name, but for `select` = select_layers and `run` = plan_run. Meanings stand in
 * attn/api.h. Those of an assignment are in assignment.h and steering.h. */
#ifndef CORE_SELECT_SELECT_H
#define CORE_SELECT_SELECT_H

#include "select/assignment.h"

attn_status select_layers(attn_runtime *runtime, const struct attn_select_options *options,
                          const struct attn_layer_desc *const *layers, int32_t num_layers,
                          attn_assignment **assignment, struct attn_error *error);
attn_status best_device(const attn_runtime *runtime, const char *backend,
                        struct attn_device *device, struct attn_error *error);

#endif
