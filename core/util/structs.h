/* SPDX-License-Identifier: Apache-2.0 */
/* Reading structs of callers that were compiled against an older or newer ABI. */
#ifndef CORE_UTIL_STRUCTS_H
#define CORE_UTIL_STRUCTS_H

#include <attn/version.h>
#include <stdbool.h>
#include <stddef.h>

#include "util/error.h"

/* Copies an engine's input into `copy` of `size` bytes: a missing tail becomes zero, an unknown
 * tail of zeros is ignored, any other is refused, as is a struct_size under `minimum` (the size in
 * ABI 0.3). copy->struct_size is set to `size`. `name` is the struct's name, for the error.
 * `source` NULL is refused. */
attn_status struct_read(void *copy, size_t size, size_t minimum, const void *source,
                        const char *name, struct attn_error *error);

/* Likewise a table of functions or a declaration, of which an unknown tail is ignored. */
attn_status table_read(void *copy, size_t size, size_t minimum, const void *source,
                       const char *name, struct attn_error *error);

/* Likewise element `index` of an array whose elements are `given` bytes apart, which have no
 * struct_size of their own. */
attn_status element_read(void *copy, size_t size, const void *array, size_t given, int32_t index,
                         const char *name, struct attn_error *error);

/* Writes `size` bytes of ours into a caller's struct of its own struct_size, cutting or
 * zero-filling the tail; the caller's `struct_size` and `next` stay. */
attn_status struct_write(void *destination, const void *source, size_t size, size_t minimum);

/* Is it between engines and kernels alone: a vendor's, or such a draft? */
static inline bool ext_is_handed_on(uint32_t id)
{
    return id >= ATTN_EXT_VENDOR || (id >= ATTN_EXT_DRAFT_KERNELS && id < 0x1000);
}

/* The extension of that id in a chain that has passed ext_check, or NULL. */
const struct attn_ext *ext_find(const struct attn_ext *next, uint32_t id);

/* Do both chains have the same extensions in one order, by every byte behind the header? */
bool ext_same(const struct attn_ext *a, const struct attn_ext *b);

/* Refuses extensions that are neither in `known` nor optional, a second one of an id, unknown
 * flags, chains longer than 64, sizes under those of ABI 0.3 (under a header, of those not known),
 * and unknown tails that are not zero, but for declarations' (attn/version.h). */
attn_status ext_check(const struct attn_ext *next, const uint32_t *known, int32_t num_known,
                      const char *name, struct attn_error *error);

/* Where ext_narrow puts copies. */
struct ext_room {
    _Alignas(max_align_t) unsigned char bytes[ATTN_EXT_COPIED_BYTES];
};

/* Checks the chain, too, and leaves in *next what is known: the chain as it is, or, where it holds
 * anything else, copies in `room`. */
attn_status ext_narrow(const struct attn_ext **next, const uint32_t *known, int32_t num_known,
                       struct ext_room *room, const char *name, struct attn_error *error);

#endif
