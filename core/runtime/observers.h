/* SPDX-License-Identifier: Apache-2.0 */
/* Slots of struct attn_api before which observers stand: what watches calls and has no part in
 * them. They are in observers/ next to the core, whose other files know nothing of them; without an
 * observer each slot is the core's function of its name and a test. */
#ifndef CORE_RUNTIME_OBSERVERS_H
#define CORE_RUNTIME_OBSERVERS_H

#include <attn/api.h>

attn_status observed_runtime_create(const struct attn_runtime_options *options,
                                    attn_runtime **runtime, struct attn_error *error);
void observed_runtime_destroy(attn_runtime *runtime);
attn_status observed_select(attn_runtime *runtime, const struct attn_select_options *options,
                            const struct attn_layer_desc *const *layers, int32_t num_layers,
                            attn_assignment **assignment, struct attn_error *error);
attn_status observed_model_create(attn_runtime *runtime, const attn_assignment *assignment,
                                  const struct attn_model_options *options, attn_model **model,
                                  struct attn_error *error);
void observed_model_destroy(attn_model *model);
attn_status observed_plan_create(attn_model *model, int32_t group,
                                 const struct attn_plan_options *options, attn_plan **plan,
                                 struct attn_error *error);
attn_status observed_plan_batch(attn_plan *plan, const struct attn_batch *batch, void *stream,
                                struct attn_error *error);
attn_status observed_plan_graph(attn_plan *plan, int32_t mode, const struct attn_batch *batch,
                                void *stream, struct attn_error *error);
attn_status observed_plan_update_block_table(attn_plan *plan, const attn_plan *source,
                                             const struct attn_batch *tables, void *stream,
                                             struct attn_error *error);
attn_status observed_graph_launch(attn_open_device *opened, void *graph, void *stream,
                                  struct attn_error *error);

/* Around a step's operation that is no kernel of an instance. 0: this thread is in no step that is
 * watched. */
int64_t observe_operation(const char *name);
void observe_operation_end(const char *name, int64_t begin);

#endif
