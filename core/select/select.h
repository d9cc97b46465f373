/* SPDX-License-Identifier: Apache-2.0 */
/* The select room's slots of struct attn_api. Naming rule of all rooms: a slot's function has the
 * slot's own name, but for `select` = select_layers and `run` = plan_run. Meanings stand in
 * attn/api.h. Those of an assignment are in assignment.h, too. */
#ifndef CORE_SELECT_SELECT_H
#define CORE_SELECT_SELECT_H

#include "select/assignment.h"
#include "select/grammar.h"
#include "util/text.h"

attn_status select_layers(attn_runtime *runtime, const struct attn_select_options *options,
                          const struct attn_layer_desc *const *layers, int32_t num_layers,
                          attn_assignment **assignment, struct attn_error *error);
attn_status best_device(const attn_runtime *runtime, const char *backend,
                        struct attn_device *device, struct attn_error *error);

/* An assignment as text, the same on every machine. A head line, then one line a layer:
 *
 *     attn-assignment 1
 *     layer 0 prefill=cpu_ref decode=cpu_ref kv_dtype=bf16 block_size=16 layout=nhd name=layers.0
 *
 * kv_dtype is K's/V's where they differ, and a vendor's code is its number, 0x10001. The name
 * stands last since it may hold spaces. */
#define EXPORT_HEAD "attn-assignment 1"

/* The lines of the layers. */
void assignment_add_layers(struct text *out, const attn_assignment *assignment);
/* Replaces the rules by one order per layer and phase. */
attn_status import_rules(struct rules *rules, const char *text, int32_t num_layers,
                         struct arena *arena, struct attn_error *error);
/* Refuses an assignment that came out otherwise than the text says, word for word. */
attn_status import_hold(const struct attn_assignment *assignment, const char *text,
                        struct attn_error *error);
/* "`whose` holds another choice:" and how lines of layers, or whole records of a lock, differ. */
attn_status refuse_choice(const attn_runtime *runtime, const char *field, const char *whose,
                          const char *record, const char *own, const char *in_record,
                          struct attn_error *error);

/* A slot of struct attn_api. */
attn_status assignment_export(const attn_assignment *assignment, char *text, size_t size,
                              size_t *needed, struct attn_error *error);

#endif
