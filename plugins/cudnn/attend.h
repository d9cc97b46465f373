/* SPDX-License-Identifier: Apache-2.0 */
/* The slots that differ from gpu/host's. */
#ifndef CUDNN_ATTEND_H
#define CUDNN_ATTEND_H

#include "gpu/host/instance.h"

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
