/* SPDX-License-Identifier: Apache-2.0 */
/* The table by which the core knows this room. */
#include "operators.h"

static attn_status choice(const attn_runtime *runtime, const struct attn_layer_desc *const *layers,
                          int32_t num_layers, struct arena *arena, struct rules *rules,
                          const char **text, struct attn_error *error)
{
    TRY_IF(*text == NULL, lock_choice(runtime, layers, num_layers, arena, text, error));
    return *text != NULL ? import_rules(rules, *text, num_layers, arena, error) : ATTN_OK;
}

const struct steering steering = {known_read, known_rank,  known_lacks,
                                  choice,     import_hold, lock_hold};
