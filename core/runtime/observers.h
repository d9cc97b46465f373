/* SPDX-License-Identifier: Apache-2.0 */
/* Slots of struct attn_api before which observers stand: what watches calls and has no part in
 * them. They are in observers/ next to the core, whose other files know nothing of them; without an
 * observer each slot is the core's function of its name and a test. */
#ifndef CORE_RUNTIME_OBSERVERS_H
#define CORE_RUNTIME_OBSERVERS_H

#include <attn/api.h>

#include "util/slots.h"

SLOT_OF(attn_api, runtime_create, observed_runtime_create);
SLOT_OF(attn_api, runtime_destroy, observed_runtime_destroy);
SLOT_OF(attn_api, select, observed_select);
SLOT_OF(attn_api, model_create, observed_model_create);
SLOT_OF(attn_api, model_destroy, observed_model_destroy);
SLOT_OF(attn_api, plan_create, observed_plan_create);
SLOT_OF(attn_api, plan_batch, observed_plan_batch);
SLOT_OF(attn_api, plan_graph, observed_plan_graph);
SLOT_OF(attn_api, plan_update_block_table, observed_plan_update_block_table);
SLOT_OF(attn_device_services, launch_graph, observed_graph_launch);

/* Around a step's operation that is no kernel of an instance. 0: this thread is in no step that is
 * watched. */
int64_t observe_operation(const char *name);
void observe_operation_end(const char *name, int64_t begin);

#endif
