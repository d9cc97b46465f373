/* SPDX-License-Identifier: Apache-2.0 */
/* The buffers that kernels are handed while a case runs, so that a bad address can be named by the
 * argument next to it. */
#ifndef CHECK_BUFFERS_H
#define CHECK_BUFFERS_H

#include "harness/image.h"

#define BUFFER_TEXT 160

/* From now until buffers_forget of the same address: all regions of an image, or one buffer. What
 * does not fit into the table is left out. Any thread. */
void buffers_add_image(const void *memory, const struct image *image);
void buffers_add(const void *memory, size_t size, const char *what);
void buffers_forget(const void *memory);

/* "12 bytes past the end of out", into `text` of BUFFER_TEXT bytes, which is returned. Safe in a
 * signal handler. */
const char *buffer_at_offset(const struct image *image, int64_t offset, char *text);
const char *buffer_at_address(const void *address, char *text);

#endif
