/* SPDX-License-Identifier: Apache-2.0 */
#include "util/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define NAME_SIZE 63

void text_init(struct text *text, const struct attn_host *host)
{
    memset(text, 0, sizeof *text);
    text->host = host;
}

void text_finish(struct text *text)
{
    if (text->data != NULL) {
        text->host->release(text->host->user, text->data, text->capacity);
    }
    text_init(text, text->host);
}

/* Room for `more` bytes and a NUL. */
static bool reserve(struct text *text, size_t more)
{
    size_t needed = text->length + more + 1;
    size_t capacity = text->capacity != 0 ? text->capacity : 128;
    char *data = NULL;

    if (text->failed || needed <= text->length) {
        text->failed = true;
        return false;
    }
    if (needed <= text->capacity) {
        return true;
    }
    while (capacity < needed) {
        if (capacity > SIZE_MAX / 2) {
            text->failed = true;
            return false;
        }
        capacity *= 2;
    }
    data = text->host->allocate(text->host->user, capacity, 8);
    if (data == NULL) {
        text->failed = true;
        return false;
    }
    if (text->data != NULL) {
        memcpy(data, text->data, text->length);
        text->host->release(text->host->user, text->data, text->capacity);
    }
    data[text->length] = '\0';
    text->data = data;
    text->capacity = capacity;
    return true;
}

void text_add_bytes(struct text *text, const void *bytes, size_t size)
{
    if (size == 0 || !reserve(text, size)) {
        return;
    }
    memcpy(text->data + text->length, bytes, size);
    text->length += size;
    text->data[text->length] = '\0';
}

void text_add_string(struct text *text, const char *string)
{
    text_add_bytes(text, string, strlen(string));
}

void text_add(struct text *text, const char *format, ...)
{
    va_list arguments;
    int length = 0;

    va_start(arguments, format);
    length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length < 0 || !reserve(text, (size_t)length)) {
        text->failed = true;
        return;
    }
    va_start(arguments, format);
    vsnprintf(text->data + text->length, (size_t)length + 1, format, arguments);
    va_end(arguments);
    text->length += (size_t)length;
}

const char *text_get(const struct text *text)
{
    return text->data != NULL ? text->data : "";
}

size_t utf8_cut(const char *string, size_t length)
{
    size_t cut = length;

    while (cut > 0 && ((unsigned char)string[cut] & 0xc0u) == 0x80u) {
        cut--;
    }
    return cut;
}

/* Bytes of the valid UTF-8 character at `s`, or 0. A NUL is no continuation, so nothing past it is
 * read. */
static size_t utf8_length(const unsigned char *s)
{
    size_t length = 0;
    uint32_t code = 0;
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};

    if (s[0] < 0x80) {
        return 1;
    }
    if ((s[0] & 0xe0u) == 0xc0u) {
        length = 2;
        code = s[0] & 0x1fu;
    } else if ((s[0] & 0xf0u) == 0xe0u) {
        length = 3;
        code = s[0] & 0x0fu;
    } else if ((s[0] & 0xf8u) == 0xf0u) {
        length = 4;
        code = s[0] & 0x07u;
    } else {
        return 0;
    }
    for (size_t i = 1; i < length; i++) {
        if ((s[i] & 0xc0u) != 0x80u) {
            return 0;
        }
        code = (code << 6) | (s[i] & 0x3fu);
    }
    if (code < least[length] || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) {
        return 0;
    }
    return length;
}

bool text_is_clean(const char *string, size_t max)
{
    const unsigned char *s = (const unsigned char *)string;
    size_t at = 0;

    if (string == NULL) {
        return false;
    }
    while (at <= max && s[at] != '\0') {
        size_t length = utf8_length(s + at);

        if (length == 0 || s[at] < 0x20 || s[at] == 0x7f) {
            return false;
        }
        at += length;
    }
    return at <= max;
}

bool text_is_name(const char *string)
{
    size_t length = 0;

    if (string == NULL || string[0] < 'a' || string[0] > 'z') {
        return false;
    }
    for (; string[length] != '\0'; length++) {
        char c = string[length];

        if (length >= NAME_SIZE ||
            !((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_')) {
            return false;
        }
    }
    return true;
}
