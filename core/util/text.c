/* SPDX-License-Identifier: Apache-2.0 */
#include "util/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define NAME_SIZE 63

void text_init(struct text *text, const struct attn_host *host)
{
    *text = (struct text){.host = host};
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
    const size_t needed = text->length + more + 1;
    size_t capacity = text->capacity != 0 ? text->capacity : 128;
    text->failed |= needed <= text->length || needed > SIZE_MAX / 4;
    if (text->failed || needed <= text->capacity) {
        return !text->failed;
    }
    while (capacity < needed) {
        capacity *= 2;
    }
    char *data = text->host->allocate(text->host->user, capacity, 8);
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

void text_add(struct text *text, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(NULL, 0, format, arguments);
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

attn_status text_finish_error(struct text *text, attn_status status, const char *field,
                              struct attn_error *error)
{
    status = text->data != NULL ? error_set(error, status, field, "%s", text->data)
                                : NO_MEMORY(field, "the reasons");
    text_finish(text);
    return status;
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
