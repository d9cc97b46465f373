/* SPDX-License-Identifier: Apache-2.0 */
/* Memory from an engine's allocator. */
#ifndef CORE_UTIL_ALLOC_H
#define CORE_UTIL_ALLOC_H

#include <attn/host.h>
#include <string.h>

#define CORE_ALIGNMENT 64

/* Zeroed, aligned to CORE_ALIGNMENT; NULL for size 0 or without memory. */
static inline void *host_alloc(const struct attn_host *host, size_t size)
{
    void *memory = size > 0 ? host->allocate(host->user, size, CORE_ALIGNMENT) : NULL;
    return memory != NULL ? memset(memory, 0, size) : NULL;
}

/* Accepts NULL. */
static inline void host_free(const struct attn_host *host, void *memory, size_t size)
{
    if (memory != NULL) {
        host->release(host->user, memory, size);
    }
}

#endif
