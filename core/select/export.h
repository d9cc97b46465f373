/* SPDX-License-Identifier: Apache-2.0 */
/* An assignment as text, the same on every machine. A head line, then one line a layer:
 *
 *     attn-assignment 1
 *     layer 0 prefill=cpu_ref decode=cpu_ref kv_dtype=bf16 block_size=16 layout=nhd name=layers.0
 *
 * kv_dtype is K's/V's where they differ, and a vendor's code is its number, 0x10001. The name
 * stands last since it may hold spaces. */
#ifndef CORE_SELECT_EXPORT_H
#define CORE_SELECT_EXPORT_H

#include "select/assignment.h"
#include "select/grammar.h"
#include "util/text.h"

#define EXPORT_HEAD "attn-assignment 1"

/* The lines of the layers. */
void assignment_add_layers(struct text *out, const attn_assignment *assignment);
/* Replaces the rules by one order per layer and phase. */
attn_status import_rules(struct rules *rules, const char *text, int32_t num_layers,
                         struct arena *arena, struct attn_error *error);
/* Refuses an assignment that came out otherwise than the text says. */
attn_status import_hold(const struct attn_assignment *assignment, const char *text,
                        struct attn_error *error);

/* A slot of struct attn_api. */
attn_status assignment_export(const attn_assignment *assignment, char *text, size_t size,
                              size_t *needed, struct attn_error *error);

#endif
