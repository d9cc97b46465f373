/* SPDX-License-Identifier: Apache-2.0 */
/* The buffers that kernels are handed while a case runs, so that a bad address can be named by the
 * argument next to it. */
#ifndef CHECK_PLACES_H
#define CHECK_PLACES_H

#include "harness/image.h"

#define PLACE_TEXT 160

/* From now until place_forget of the same address: all regions of an image, or one buffer. What
 * does not fit into the table is left out. Any thread. */
void place_image(const void *memory, const struct image *image);
void place_buffer(const void *memory, size_t size, const char *what);
void place_forget(const void *memory);

/* "12 bytes past the end of out", into `text` of PLACE_TEXT bytes, which is returned. Safe in a
 * signal handler. */
const char *place_of_offset(const struct image *image, int64_t offset, char *text);
const char *place_of_address(const void *address, char *text);

#endif
