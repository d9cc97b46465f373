/* SPDX-License-Identifier: Apache-2.0 */
/* The slots that differ from gpu/host's. */
#ifndef CUDNN_ATTEND_H
#define CUDNN_ATTEND_H

#include "cudnn/graph.h"
#include "gpu/host/instance.h"

/* What a layer's graphs have, but for its keys and the sizes of a batch. */
struct graph_shape cudnn_shape(const struct attn_layer_desc *layer);
/* Sets query_len, and the mask that this needs. One query sees all of its keys, and cuDNN has
 * kernels for that: without a mask or a sink, and without the log-sum-exp, of which cuDNN 9.19
 * writes the first head of each KV head alone. With one of these it goes as the first of two rows.
 */
void cudnn_set_query_len(struct graph_shape *shape, int64_t query_len, int32_t needs_lse);

attn_status cudnn_prepare(const struct attn_prepare_args *args, attn_prepared **prepared,
                          struct attn_error *error);
void cudnn_release(attn_instance *instance, attn_prepared *prepared);
attn_status cudnn_create_plan_state(const struct attn_schedule_size_args *args,
                                    attn_plan_state **state, struct attn_error *error);
void cudnn_destroy_plan_state(attn_instance *instance, attn_plan_state *state);
attn_status cudnn_schedule_size(const struct attn_schedule_size_args *args,
                                struct attn_schedule_size *size, struct attn_error *error);
attn_status cudnn_schedule(const struct attn_attend_args *args, int32_t mode,
                           struct attn_error *error);
attn_status cudnn_update_block_table(const struct attn_attend_args *args, struct attn_error *error);
attn_status cudnn_attend(const struct attn_attend_args *args, struct attn_error *error);

#endif
