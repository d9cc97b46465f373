/* SPDX-License-Identifier: Apache-2.0 */
/* Text: a builder that grows through the host's allocator, and checks of text from outside. */
#ifndef CORE_UTIL_TEXT_H
#define CORE_UTIL_TEXT_H

#include <attn/host.h>
#include <stdbool.h>

#include "util/error.h"
#include "util/safe_text.h"

/* Zero-initialise but for `host`, whose allocate and release are filled. Once an addition found no
 * memory, `failed` stays true and further ones do nothing. */
struct text {
    const struct attn_host *host;
    char *data; /* NUL-terminated if not NULL */
    size_t length;
    size_t capacity; /* bytes allocated */
    bool failed;
};

void text_init(struct text *text, const struct attn_host *host);
void text_finish(struct text *text);
void text_add(struct text *text, const char *format, ...) CORE_PRINTF(2, 3);
void text_add_bytes(struct text *text, const void *bytes, size_t size);
/* "" if nothing was added. */
const char *text_get(const struct text *text);

/* Ends a text that is an error's message: as much of it as there was memory for. Returns `status`,
 * or, where nothing of it was to be had, ATTN_ERROR_OUT_OF_MEMORY. */
attn_status text_finish_error(struct text *text, attn_status status, const char *field,
                              struct attn_error *error);

/* True for [a-z][a-z0-9_]* of at most 63 bytes. NULL is false. */
bool text_is_name(const char *string);

#endif
