/* SPDX-License-Identifier: Apache-2.0 */
/* The step room's slots of struct attn_api; naming rule in select/select.h (`run` = plan_run).
 * Meanings stand in attn/api.h. */
#ifndef CORE_STEP_PLAN_H
#define CORE_STEP_PLAN_H

#include <attn/api.h>

attn_status plan_create(attn_model *model, int32_t group, const struct attn_plan_options *options,
                        attn_plan **plan, struct attn_error *error);
void plan_destroy(attn_plan *plan);
attn_status plan_workspace(const attn_plan *plan, struct attn_workspace *workspace,
                           struct attn_error *error);
attn_status plan_bind_workspace(attn_plan *plan, const struct attn_workspace *workspace,
                                struct attn_error *error);
int32_t plan_graph_level(const attn_plan *plan);
int32_t plan_graph_fill(const attn_plan *plan);
attn_status plan_batch(attn_plan *plan, const struct attn_batch *batch, void *stream,
                       struct attn_error *error);
attn_status plan_graph(attn_plan *plan, int32_t mode, const struct attn_batch *batch, void *stream,
                       struct attn_error *error);
attn_status plan_update_block_table(attn_plan *plan, const attn_plan *source,
                                    const struct attn_batch *tables, void *stream,
                                    struct attn_error *error);
attn_status plan_split(const attn_plan *plan, struct attn_batch_split *split);
attn_status plan_run(attn_plan *plan, attn_layer *layer, const struct attn_step_io *io,
                     struct attn_error *error);

attn_status batch_order(const struct attn_batch_order *requests, int32_t *order, int32_t *moved,
                        struct attn_error *error);
/* local(length), see struct attn_context_parallel */
int32_t local_keys(int32_t length, int32_t rank, int32_t world_size, int32_t interleave);
attn_status context_parallel_length(const struct attn_rank_keys *keys, int32_t length,
                                    int32_t *local, struct attn_error *error);
attn_status context_parallel_slots(const struct attn_rank_keys *keys, int64_t *slots,
                                   struct attn_error *error);

#endif
