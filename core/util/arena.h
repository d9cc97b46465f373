/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that is released all at once: text and arrays of what a runtime found. One thread at a
 * time. */
#ifndef CORE_UTIL_ARENA_H
#define CORE_UTIL_ARENA_H

#include <attn/host.h>
#include <stdbool.h>
#include <string.h>

struct arena_chunk;

struct arena {
    const struct attn_host *host;
    struct arena_chunk *chunks; /* newest first */
    bool failed;                /* the host once had no memory for it */
};

void arena_init(struct arena *arena, const struct attn_host *host);
void arena_finish(struct arena *arena);
/* Zeroed, aligned to 16; NULL when there is no memory or size is 0. */
void *arena_alloc(struct arena *arena, size_t size);
/* `count` items of `size` bytes; NULL on overflow too. */
void *arena_array(struct arena *arena, size_t count, size_t size);
char *arena_string(struct arena *arena, const char *string);
char *arena_string_n(struct arena *arena, const char *string, size_t length);

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
