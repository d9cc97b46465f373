/* SPDX-License-Identifier: Apache-2.0 */
/* Layers whose keys are chosen by lists: attn_index_lists. */
#ifndef CORE_SELECT_INDEX_LISTS_H
#define CORE_SELECT_INDEX_LISTS_H

#include "select/match_check.h"

/* Checks layer->lists, if any, fills in its defaults, and takes it out of the layer that kernels
 * see where an MLA layer's topk says the same. Before compositions look at the layer. */
attn_status lists_resolve(struct layer *layer, struct attn_error *error);

/* Are they what attn_mla_desc.topk and attn_io_mla.topk_indices say, too? */
bool lists_are_plain(const struct layer *layer);

/* How many lists a token has. */
int32_t lists_per_token(const struct layer *layer);

/* Do both layers have equal ones, or none? */
bool lists_same(const struct layer *a, const struct layer *b);

/* After compositions are decided: what the backend declares, and steps that the core composes. */
void check_lists(struct check *check);

#endif
