/* SPDX-License-Identifier: Apache-2.0 */
/* The caches that a layer has beyond those of its kind: attn_layer_caches. */
#ifndef CORE_SELECT_LAYER_CACHES_H
#define CORE_SELECT_LAYER_CACHES_H

#include "select/match_check.h"

/* How many tables of a batch they need next to its own fields; 0 for plain layers. */
int32_t layer_num_tables(const struct layer *layer);

/* Rows in a block of one of them, the layer's block size being chosen. */
int32_t cache_block_size(const struct attn_cache_desc *cache, int32_t layer_block_size);

/* Do both have equal ones? Plain layers do. */
bool layer_same_caches(const struct layer *a, const struct layer *b);

/* After compositions are decided: roles, tables, and steps that the core composes of others. */
void check_caches(struct check *check);

#endif
