/* SPDX-License-Identifier: Apache-2.0 */
/* ATTN_TRACE: slots of struct attn_api that write what they do as spans (host/trace_file.h). A
 * model's instances get a table whose kernels are timed, and a step that is traced another entry to
 * its runs: without a trace nothing of this is on their way. */
#ifndef CORE_STEP_TRACE_H
#define CORE_STEP_TRACE_H

#include <attn/api.h>

attn_status trace_select(attn_runtime *runtime, const struct attn_select_options *options,
                         const struct attn_layer_desc *const *layers, int32_t num_layers,
                         attn_assignment **assignment, struct attn_error *error);
attn_status trace_model_create(attn_runtime *runtime, const attn_assignment *assignment,
                               const struct attn_model_options *options, attn_model **model,
                               struct attn_error *error);
void trace_model_destroy(attn_model *model);
attn_status trace_plan_create(attn_model *model, int32_t group,
                              const struct attn_plan_options *options, attn_plan **plan,
                              struct attn_error *error);
attn_status trace_plan_batch(attn_plan *plan, const struct attn_batch *batch, void *stream,
                             struct attn_error *error);
attn_status trace_plan_graph(attn_plan *plan, int32_t mode, const struct attn_batch *batch,
                             void *stream, struct attn_error *error);
attn_status trace_plan_update_block_table(attn_plan *plan, const attn_plan *source,
                                          const struct attn_batch *tables, void *stream,
                                          struct attn_error *error);

/* Around what is no kernel of an instance. 0: this thread is in no step that is traced. */
int64_t trace_operation(const char *name);
void trace_operation_end(const char *name, int64_t begin);

#endif
