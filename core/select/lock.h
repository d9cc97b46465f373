/* SPDX-License-Identifier: Apache-2.0 */
/* ATTN_LOCK: the same choice again, or a refusal; host/lock_text.h has the file's form. */
#ifndef CORE_SELECT_LOCK_H
#define CORE_SELECT_LOCK_H

#include "select/assignment.h"

/* Before an assignment is bound. With ATTN_LOCK=FILE it has to be one of the file's records, word
 * for word, else the error says what differs from the record that is nearest. With
 * ATTN_LOCK=write:FILE its record is added to the file, unless it stands there. */
attn_status lock_apply(const attn_assignment *assignment, struct attn_error *error);

/* Before a selection, with ATTN_LOCK=take:FILE: *text becomes the choice of the first record that
 * has layers of these names (and block sizes, where they are asked for), as import_rules takes it,
 * and is left as it is without one: then lock_apply refuses the choice. */
attn_status lock_choice(const attn_runtime *runtime, const struct attn_layer_desc *const *layers,
                        int32_t num_layers, struct arena *arena, const char **text,
                        struct attn_error *error);

#endif
