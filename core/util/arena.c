/* SPDX-License-Identifier: Apache-2.0 */
#include "util/arena.h"

#include <string.h>

#define ALIGNMENT ((size_t)16)
#define CHUNK_SIZE ((size_t)16384)

struct arena_chunk {
    struct arena_chunk *next;
    size_t size; /* whole allocation */
    size_t used; /* header included */
};

#define HEADER_SIZE ((sizeof(struct arena_chunk) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT)

void arena_init(struct arena *arena, const struct attn_host *host)
{
    *arena = (struct arena){.host = host};
}

void arena_finish(struct arena *arena)
{
    while (arena->chunks != NULL) {
        struct arena_chunk *chunk = arena->chunks;
        arena->chunks = chunk->next;
        arena->host->release(arena->host->user, chunk, chunk->size);
    }
}

static struct arena_chunk *add_chunk(struct arena *arena, size_t needed)
{
    size_t size = HEADER_SIZE + (needed > CHUNK_SIZE ? needed : CHUNK_SIZE);
    struct arena_chunk *chunk = arena->host->allocate(arena->host->user, size, ALIGNMENT);
    if (chunk == NULL) {
        arena->failed = true;
        return NULL;
    }
    memset(chunk, 0, size);
    chunk->next = arena->chunks;
    chunk->size = size;
    chunk->used = HEADER_SIZE;
    arena->chunks = chunk;
    return chunk;
}

void *arena_alloc(struct arena *arena, size_t size)
{
    struct arena_chunk *chunk = arena->chunks;
    if (size == 0 || size > SIZE_MAX / 2) {
        return NULL;
    }
    size = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (chunk == NULL || chunk->size - chunk->used < size) {
        chunk = add_chunk(arena, size);
        if (chunk == NULL) {
            return NULL;
        }
    }
    void *memory = (unsigned char *)chunk + chunk->used;
    chunk->used += size;
    return memory;
}

void *arena_array(struct arena *arena, size_t count, size_t size)
{
    if (size != 0 && count > SIZE_MAX / size) {
        return NULL;
    }
    return arena_alloc(arena, count * size);
}

char *arena_string_n(struct arena *arena, const char *string, size_t length)
{
    char *copy = arena_alloc(arena, length + 1);
    if (copy != NULL) {
        memcpy(copy, string, length);
    }
    return copy;
}

char *arena_string(struct arena *arena, const char *string)
{
    return arena_string_n(arena, string, strlen(string));
}
