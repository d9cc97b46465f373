/* SPDX-License-Identifier: Apache-2.0 */
/* The step room's slots of struct attn_api; naming rule in select/select.h (`run` = plan_run).
 * Meanings stand in attn/api.h. */
#ifndef CORE_STEP_PLAN_H
#define CORE_STEP_PLAN_H

#include <attn/api.h>

#include "util/slots.h"

SLOT(plan_create);
SLOT(plan_destroy);
SLOT(plan_workspace);
SLOT(plan_bind_workspace);
SLOT(plan_graph_level);
SLOT(plan_graph_fill);
SLOT(plan_batch);
SLOT(plan_graph);
SLOT(plan_update_block_table);
SLOT(plan_split);
SLOT_OF(attn_api, run, plan_run);

SLOT(batch_order);
/* local(length), see struct attn_context_parallel */
int32_t local_keys(int32_t length, int32_t rank, int32_t world_size, int32_t interleave);
SLOT(context_parallel_length);
SLOT(context_parallel_slots);

#endif
