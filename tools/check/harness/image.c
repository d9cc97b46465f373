/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/image.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"

#define MAX_BUFFERS 32
#define NEAR ((uint64_t)1 << 32) /* bytes; what is further away is no neighbour */
#define NULL_PAGE 65536

void image_finish(struct image *image)
{
    free(image->bytes);
    free(image->regions);
    *image = (struct image){NULL};
}

size_t image_add(struct image *image, const char *name, size_t size, size_t alignment,
                 bool writable)
{
    size_t offset = (image->used + IMAGE_GUARD + alignment - 1) / alignment * alignment;
    size_t end = offset + size + IMAGE_GUARD;
    if (end > image->size) {
        const size_t want = end > 2 * image->size ? end : 2 * image->size;
        image->bytes = command_realloc(image->bytes, want, 1);
        memset(image->bytes + image->size, IMAGE_POISON, want - image->size);
        image->size = want;
    }
    image->regions =
        command_realloc(image->regions, (size_t)image->num_regions + 1, sizeof *image->regions);
    image->regions[image->num_regions++] = (struct region){name, offset, size, writable};
    image->used = end;
    return offset;
}

int64_t image_stray_write(const struct image *image, const uint8_t *after)
{
    size_t at = 0;
    for (int32_t i = 0; i <= image->num_regions; i++) {
        bool last = i == image->num_regions;
        if (!last && !image->regions[i].writable) {
            continue;
        }
        size_t end = last ? image->used : image->regions[i].offset;
        if (memcmp(image->bytes + at, after + at, end - at) != 0) {
            while (image->bytes[at] == after[at]) {
                at++;
            }
            return (int64_t)at;
        }
        at = last ? end : end + image->regions[i].size;
    }
    return -1;
}

static struct known_buffer {
    _Atomic(const void *) memory; /* NULL: free */
    const struct image *image;    /* NULL: one buffer */
    const char *what;
    size_t size;
} known[MAX_BUFFERS];

void buffers_add(const void *memory, const struct image *image, size_t size, const char *what)
{
    for (int32_t i = 0; i < MAX_BUFFERS && memory != NULL; i++) {
        const void *none = NULL;
        if (atomic_load(&known[i].memory) == NULL) {
            known[i].image = image;
            known[i].what = what;
            known[i].size = size;
            if (atomic_compare_exchange_strong(&known[i].memory, &none, memory)) {
                return;
            }
        }
    }
}

void buffers_forget(const void *memory)
{
    for (int32_t i = 0; i < MAX_BUFFERS && memory != NULL; i++) {
        if (atomic_load(&known[i].memory) == memory) {
            atomic_store(&known[i].memory, NULL);
            return;
        }
    }
}

/* The buffer that is nearest so far. */
struct neighbour {
    const char *what;
    uint64_t distance; /* from its beginning; PAST: from the first byte that is not its own */
    enum { INSIDE, BEFORE, PAST } side;
};

static void consider(struct neighbour *nearest, const char *what, int64_t offset, size_t size)
{
    struct neighbour n = {what, (uint64_t)offset, INSIDE};
    if (offset < 0) {
        n = (struct neighbour){what, 0 - (uint64_t)offset, BEFORE};
    } else if ((uint64_t)offset >= size) {
        n = (struct neighbour){what, (uint64_t)offset - size, PAST};
    }
    bool nearer = nearest->what == NULL || (nearest->side != INSIDE && n.side == INSIDE) ||
                  (nearest->side != INSIDE && n.distance < nearest->distance);
    if (nearer && (n.side == INSIDE || n.distance < NEAR)) {
        *nearest = n;
    }
}

static void consider_image(struct neighbour *nearest, const struct image *image, int64_t offset)
{
    for (int32_t i = 0; i < image->num_regions; i++) {
        const struct region *region = &image->regions[i];
        if (region->size > 0) {
            consider(nearest, region->name, offset - (int64_t)region->offset, region->size);
        }
    }
}

/* snprintf may lock. */
static char *add_text(char *at, const char *end, const char *text)
{
    while (*text != '\0' && at < end) {
        *at++ = *text++;
    }
    *at = '\0';
    return at;
}

static char *add_number(char *at, const char *end, uint64_t number, uint32_t base)
{
    char digits[24];
    int32_t first = (int32_t)sizeof digits - 1;
    digits[first] = '\0';
    do {
        digits[--first] = "0123456789abcdef"[number % base];
        number /= base;
    } while (number > 0);
    return add_text(at, end, digits + first);
}

static char *add_neighbour(char *at, const char *end, const struct neighbour *n)
{
    if (n->side == INSIDE) {
        at = add_text(at, end, "byte ");
        at = add_number(at, end, n->distance, 10);
        at = add_text(at, end, " of ");
    } else {
        at = add_number(at, end, n->distance, 10);
        at = add_text(at, end, n->side == PAST ? " bytes past the end of " : " bytes before ");
    }
    return add_text(at, end, n->what);
}

const char *buffer_at_offset(const struct image *image, int64_t offset, char *text)
{
    struct neighbour nearest = {NULL, 0, INSIDE};
    consider_image(&nearest, image, offset);
    text[0] = '\0';
    if (nearest.what != NULL) {
        add_neighbour(text, text + BUFFER_TEXT - 1, &nearest);
    }
    return text;
}

const char *buffer_at_address(const void *address, char *text)
{
    struct neighbour nearest = {NULL, 0, INSIDE};
    const char *end = text + BUFFER_TEXT - 1;
    char *at = add_text(text, end, "address 0x");
    at = add_number(at, end, (uint64_t)(uintptr_t)address, 16);
    if ((uintptr_t)address < NULL_PAGE) {
        add_text(at, end, ", a NULL pointer or one close to it");
        return text;
    }
    for (int32_t i = 0; i < MAX_BUFFERS; i++) {
        const void *memory = atomic_load(&known[i].memory);
        int64_t offset = (int64_t)((uintptr_t)address - (uintptr_t)memory);
        if (memory != NULL && known[i].image != NULL) {
            consider_image(&nearest, known[i].image, offset);
        } else if (memory != NULL) {
            consider(&nearest, known[i].what, offset, known[i].size);
        }
    }
    if (nearest.what != NULL) {
        at = add_text(at, end, ", ");
        add_neighbour(at, end, &nearest);
    }
    return text;
}
