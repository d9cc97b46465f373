/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/image.h"

#include <stdlib.h>
#include <string.h>

void image_init(struct image *image)
{
    memset(image, 0, sizeof *image);
}

void image_finish(struct image *image)
{
    free(image->bytes);
    free(image->regions);
    image_init(image);
}

static bool grow(void **memory, size_t item, size_t have, size_t want)
{
    void *larger = realloc(*memory, item * want);
    if (larger == NULL) {
        return false;
    }
    memset((uint8_t *)larger + item * have, IMAGE_POISON, item * (want - have));
    *memory = larger;
    return true;
}

size_t image_add(struct image *image, const char *name, size_t size, size_t alignment,
                 bool writable)
{
    size_t offset = (image->used + IMAGE_GUARD + alignment - 1) / alignment * alignment;
    size_t end = offset + size + IMAGE_GUARD;
    if (image->failed) {
        return 0;
    }
    if (end > image->size) {
        size_t want = end > 2 * image->size ? end : 2 * image->size;
        if (!grow((void **)&image->bytes, 1, image->size, want)) {
            image->failed = true;
            return 0;
        }
        image->size = want;
    }
    if (image->num_regions == image->max_regions) {
        int32_t want = image->max_regions ? 2 * image->max_regions : 32;
        if (!grow((void **)&image->regions, sizeof *image->regions, (size_t)image->max_regions,
                  (size_t)want)) {
            image->failed = true;
            return 0;
        }
        image->max_regions = want;
    }
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
