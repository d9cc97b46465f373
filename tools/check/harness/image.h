/* SPDX-License-Identifier: Apache-2.0 */
/* One arena that holds everything a kernel may touch, with guard zones around each buffer. The
 * reference works on one copy and the backend under test on another, in its own device's memory;
 * afterwards every byte that is not an output has to be as it was. */
#ifndef CHECK_IMAGE_H
#define CHECK_IMAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define IMAGE_GUARD                                                                                \
    512 /* bytes of poison between buffers; 0xFF reads as NaN in every float type                  \
         */
#define IMAGE_POISON 0xff

/* Where a buffer lies in the arena, and whether a kernel may write it. */
struct region {
    const char *name; /* the argument's, as the ABI has it */
    size_t offset;
    size_t size;
    bool writable;
};

/* All zeros is an empty image. */
struct image {
    uint8_t *bytes; /* the initial contents */
    size_t size;
    size_t used;
    struct region *regions;
    int32_t num_regions;
};

void image_finish(struct image *image);
/* Reserves `size` poisoned bytes at a multiple of `alignment` and gives their offset. `name` is a
 * constant. */
size_t image_add(struct image *image, const char *name, size_t size, size_t alignment,
                 bool writable);
/* Whether these bytes are still those of memory that is never written. */
static inline bool is_poison(const uint8_t *memory, int64_t bytes)
{
    int64_t i = 0;
    while (i < bytes && memory[i] == IMAGE_POISON) {
        i++;
    }
    return i == bytes;
}
/* First byte outside the writable regions where `after` differs from the initial contents, or -1.
 */
int64_t image_stray_write(const struct image *image, const uint8_t *after);

#define BUFFER_TEXT 160

/* Buffers that kernels are handed while a case runs, so that a bad address can be named by the
 * argument next to it: known from now until buffers_forget of the same address: all regions of an
 * image, or one buffer. What does not fit into the table is left out. Any thread. */
void buffers_add(const void *memory, const struct image *image, size_t size, const char *what);
void buffers_forget(const void *memory);

/* "12 bytes past the end of out", into `text` of BUFFER_TEXT bytes, which is returned. Safe in a
 * signal handler. */
const char *buffer_at_offset(const struct image *image, int64_t offset, char *text);
const char *buffer_at_address(const void *address, char *text);

#endif
