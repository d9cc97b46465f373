/* SPDX-License-Identifier: Apache-2.0 */
/* The select room's slots of struct attn_api. Naming rule of all rooms: a slot's function has the
 * slot's own name, but for `select` = select_layers, `plan` = plan_batch and `run` = plan_run.
 * Meanings stand in attn/api.h. */
#ifndef CORE_SELECT_SELECT_H
#define CORE_SELECT_SELECT_H

#include "select/assignment.h"

attn_status select_layers(attn_runtime *runtime, const struct attn_select_options *options,
                          const struct attn_layer_desc *const *layers, int32_t num_layers,
                          attn_assignment **assignment, struct attn_error *error);
attn_status best_device(const attn_runtime *runtime, const char *backend,
                        struct attn_device *device, struct attn_error *error);
void assignment_destroy(attn_assignment *assignment);
int32_t assignment_num_layers(const attn_assignment *assignment);
attn_status assignment_choice(const attn_assignment *assignment, int32_t layer, int32_t phase,
                              struct attn_choice *choice);
attn_status assignment_verdict(const attn_assignment *assignment, int32_t layer, int32_t phase,
                               int32_t backend, int32_t *verdict, int32_t *num_reasons);
attn_status assignment_reason(const attn_assignment *assignment, int32_t layer, int32_t phase,
                              int32_t backend, int32_t index, struct attn_reason *reason);
attn_status assignment_export(const attn_assignment *assignment, char *text, size_t size,
                              size_t *needed, struct attn_error *error);

#endif
