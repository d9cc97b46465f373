/* SPDX-License-Identifier: Apache-2.0 */
/* The select room's slots of struct attn_api. Naming rule of all rooms: a slot's function has the
 * slot's own name, but for `select` = select_layers and `run` = plan_run. Meanings stand in
 * attn/api.h. Those of an assignment are in assignment.h and steering.h. */
#ifndef CORE_SELECT_SELECT_H
#define CORE_SELECT_SELECT_H

#include "select/assignment.h"
#include "util/slots.h"

SLOT_OF(attn_api, select, select_layers);
SLOT(best_device);

#endif
