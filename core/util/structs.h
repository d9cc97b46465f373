/* SPDX-License-Identifier: Apache-2.0 */
/* Reading structs of callers that were compiled against an older or newer ABI, by the rows of
 * abi_table.h. */
#ifndef CORE_UTIL_STRUCTS_H
#define CORE_UTIL_STRUCTS_H

#include <stdbool.h>
#include <stddef.h>

#include "util/abi_table.h"
#include "util/arena.h"
#include "util/error.h"

/* Copies a caller's struct: a missing tail becomes zero, an unknown tail of zeros is ignored, any
 * other is refused in inputs, as is a struct_size under that of ABI 0.3. The copy's struct_size is
 * that of ours. Of inputs (ABI_INPUT, ABI_DECLARED) extensions are checked, and of ABI_INPUT every
 * number. `source` NULL is refused. */
attn_status struct_read(void *copy, enum abi_id id, const void *source, struct attn_error *error);

/* What struct_read does, of element `index` of an array whose elements are `stride` bytes apart. */
attn_status element_read(void *copy, enum abi_id id, const void *array, int64_t stride,
                         int32_t index, struct attn_error *error);
/* Can elements be so many bytes apart? */
bool element_stride_is_good(enum abi_id id, int64_t stride);
#define MAX_ELEMENT 4096

/* Writes a struct of ours into a caller's struct of its own struct_size, cutting or zero-filling
 * the tail; the caller's `struct_size` and `next` stay. */
attn_status struct_write(void *destination, const void *source, enum abi_id id);
/* What struct_write does; the error brings its text, too. */
attn_status struct_give(void *destination, const void *source, enum abi_id id,
                        struct attn_error *error);

/* The initializer of a call's arguments, a struct named `args`: its size, and these fields. */
#define ABI_ARGS(...)                                                                              \
    {                                                                                              \
        .struct_size = sizeof args, __VA_ARGS__                                                    \
    }
/* Every number of it is in its range. `layer` names whose it is in errors, NULL: the struct. */
attn_status struct_check(const void *ours, enum abi_id id, const char *layer,
                         struct attn_error *error);

/* The pointer that a field of that struct holds. */
const void *field_pointer(const void *ours, const struct abi_field *field);

/* Is it between engines and kernels alone: a vendor's, or such a draft? */
static inline bool ext_is_handed_on(uint32_t id)
{
    return id >= ATTN_EXT_VENDOR || (id >= ATTN_EXT_DRAFT_KERNELS && id < 0x1000);
}

/* The extension of that id in a chain that has passed ext_check, or NULL. Its struct begins with
 * the header. */
const void *ext_find(const struct attn_ext *next, uint32_t id);

/* Do both chains have the same extensions in one order, by every byte after the header, but for
 * one of id `but`? */
bool ext_same(const struct attn_ext *a, const struct attn_ext *b, uint32_t but);

/* Copies an extension to `copy` of `size` bytes, a missing tail zero, and unchains it. */
void ext_copy(struct attn_ext *copy, const struct attn_ext *ext, size_t size);

/* Copies the core's extensions of a chain of `on`, each of today's size, in the order of the table,
 * then, `all`, those that are handed on, as they are. NULL, with arena->failed, without memory. */
const struct attn_ext *ext_copy_chain(struct arena *arena, const struct attn_ext *given,
                                      enum abi_id on, bool all);

/* Refuses extensions that are neither the core's in a chain of `on`, nor in `vendors`, nor
 * optional, a second one of an id, unknown flags, chains longer than 64, sizes under those of ABI
 * 0.3 (under a header, of those not known), and unknown tails that are not zero, but for
 * declarations' (attn/version.h). */
attn_status ext_check(const struct attn_ext *next, enum abi_id on, const uint32_t *vendors,
                      int32_t num_vendors, struct attn_error *error);
#define MAX_CHAIN 64

/* Refuses the core's extensions in a chain of `on` that no layer reads, unless marked optional;
 * `reads`: bits of ABI_READS. `layer` names it in errors, or is NULL. */
attn_status ext_check_readers(const struct attn_ext *next, enum abi_id on, uint64_t reads,
                              const char *layer, struct attn_error *error);

/* Where ext_narrow puts copies. */
struct ext_room {
    _Alignas(max_align_t) unsigned char bytes[ATTN_EXT_COPIED_BYTES];
};

/* Checks the chain, too, and leaves in *next what is known: the chain as it is, or, where it holds
 * anything else, copies in `room`. */
attn_status ext_narrow(const struct attn_ext **next, enum abi_id on, const uint32_t *vendors,
                       int32_t num_vendors, struct ext_room *room, struct attn_error *error);

#endif
