/* SPDX-License-Identifier: Apache-2.0 */
/* Text from outside: names of files and models, a plugin's messages. On a terminal or in a log it
 * may write what it likes with control characters, so it goes there made safe. The tools are built
 * with this source, too. */
#ifndef CORE_UTIL_SAFE_TEXT_H
#define CORE_UTIL_SAFE_TEXT_H

#include <stdbool.h>
#include <stddef.h>

/* Bytes of the valid UTF-8 character at `s` (RFC 3629), or 0. Nothing past a NUL is read. */
size_t utf8_length(const char *s);

/* The character that begins at `s`, of utf8_length bytes: is it C0, DEL or C1? */
bool utf8_is_control(const char *s);

/* The largest length <= `length` at which `string` (longer than that) can be cut between
 * characters. */
size_t utf8_cut(const char *string, size_t length);

/* True for at most `max` bytes of valid UTF-8 without control characters. NULL is false. */
bool text_is_clean(const char *string, size_t max);

/* In place: '?' for each byte of what is no UTF-8 or a control character; `lines`: but newlines. */
void text_make_safe(char *string, bool lines);

#endif
