/* SPDX-License-Identifier: Apache-2.0 */
/* The extensions of a layer's description: MLA, gated delta, encoders in fp8, context parallelism,
 * further caches, lists of keys. */
#ifndef CORE_SELECT_LAYER_EXT_H
#define CORE_SELECT_LAYER_EXT_H

#include "select/assignment.h"

#define MAX_VENDOR_EXTENSIONS 8 /* of one layer */

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

#endif
