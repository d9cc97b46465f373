/* SPDX-License-Identifier: Apache-2.0 */
/* attn_host's memory over the C library, which hosts of tools and tests call after they have
 * counted or refused. */
#ifndef SUPPORT_SERVICES_H
#define SUPPORT_SERVICES_H

#include <stddef.h>
#include <stdlib.h>

/* attn_host.allocate: memory at a multiple of `alignment`; NULL: no memory. */
static inline void *services_allocate(void *user, size_t size, size_t alignment)
{
    alignment = alignment < sizeof(void *) ? sizeof(void *) : alignment;
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

/* attn_host.release: accepts NULL. */
static inline void services_release(void *user, void *memory, size_t size)
{
    free(memory);
}

#endif
