/* SPDX-License-Identifier: Apache-2.0 */
/* From a caller's layer description to a complete one, its extensions among it: layer_check.c has
 * the fields, layer_ext.c the extensions and further caches. */
#ifndef CORE_SELECT_LAYER_H
#define CORE_SELECT_LAYER_H

#include "select/match.h"

#define MAX_VENDOR_EXTENSIONS 8 /* on one layer */

/* Copies the known ones into the layer, each of today's size, and vendors' as they are, and chains
 * them to its desc. */
attn_status layer_copy_extensions(struct arena *arena, struct layer *layer,
                                  const struct attn_ext *next, struct attn_error *error);

/* The copied ones: those that the layer's kind needs and takes, and their values; and what follows
 * from them for the layer. */
attn_status layer_check_extensions(struct layer *layer, struct attn_error *error);

/* The ids of a layer's vendors' extensions; gives how many there are. */
int32_t layer_vendor_ids(const struct attn_ext *next, uint32_t ids[MAX_VENDOR_EXTENSIONS]);

/* Is the extension the core's own, or one of those that a backend reads? */
bool declares_extension(const struct attn_backend_caps *caps, uint32_t id);

/* Takes vendors' optional extensions out of a layer's that `caps` do not declare. */
void layer_drop_undeclared(struct layer *layer, const struct attn_backend_caps *caps);

/* The refusal of a layer whose kind needs an extension that is not there, or takes none. */
attn_status layer_refuse_extension(const struct layer *layer, const char *extension, bool needed,
                                   struct attn_error *error);

/* How many tables of a batch the layer's further caches need next to its own fields; 0 for plain
 * layers. */
int32_t layer_num_tables(const struct layer *layer);

/* Rows in a block of a further cache, the layer's block size being chosen. */
int32_t cache_block_size(const struct attn_cache_desc *cache, int32_t layer_block_size);

/* After compositions are decided: roles and tables of further caches, and steps that the core
 * composes of others. */
void check_caches(struct check *check);

/* After compositions are decided: refuses what is in no part of a step, under `field`, where the
 * core composes the step of others; quantized outputs and MLA's are one. A cascade is left out. */
void check_alone(struct check *check, const char *field);

/* Reads, checks and completes description `index` of the model; `layers` holds the ones before it.
 * block_size may stay 0: selection chooses it. Errors name the layer, the field, its value and what
 * is allowed. */
attn_status layer_resolve(struct arena *arena, const struct attn_layer_desc *desc, int32_t index,
                          const struct assignment_layer *layers, struct layer *layer,
                          struct attn_error *error);

/* Whether two layers have one KV specification, block_size included. */
bool layer_same_cache(const struct layer *a, const struct layer *b);

/* A description whose kind takes its fields, each in its range, and no value without the switch
 * that it belongs to. An error names layer, first bad field, its value and what is allowed. */
attn_status layer_check_fields(const struct attn_layer_desc *layer, struct attn_error *error);

#endif
