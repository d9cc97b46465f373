/* SPDX-License-Identifier: Apache-2.0 */
#include "util/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "util/safe_text.h"

#define MESSAGE_AT offsetof(struct attn_error, message)
#define FIELD_AT offsetof(struct attn_error, field)

/* Copies into `size` bytes, cut at a character's end. */
static void copy_text(char *destination, size_t size, const char *source)
{
    if (size == 0) {
        return;
    }
    size_t length = strnlen(source, size);
    if (length == size) {
        length = utf8_cut(source, size - 1);
    }
    memcpy(destination, source, length);
    destination[length] = '\0';
    text_make_safe(destination, true);
}

attn_status error_set_text(struct attn_error *error, attn_status status, const char *field,
                           const char *message)
{
    if (error == NULL) {
        return status;
    }
    size_t size = error->struct_size;
    if (size >= FIELD_AT) {
        error->status = status;
        error->reserved = 0;
    }
    if (size >= MESSAGE_AT) {
        copy_text(error->field, ATTN_ERROR_FIELD_SIZE, field != NULL ? field : "");
        size -= MESSAGE_AT;
        copy_text(error->message, size < ATTN_ERROR_MESSAGE_SIZE ? size : ATTN_ERROR_MESSAGE_SIZE,
                  message != NULL ? message : "");
    }
    return status;
}

attn_status error_set(struct attn_error *error, attn_status status, const char *field,
                      const char *format, ...)
{
    char message[ATTN_ERROR_MESSAGE_SIZE + 4];
    va_list arguments;
    if (error == NULL) {
        return status;
    }
    va_start(arguments, format);
    if (vsnprintf(message, sizeof message, format, arguments) < 0) {
        copy_text(message, sizeof message, format);
    }
    va_end(arguments);
    return error_set_text(error, status, field, message);
}

attn_status error_relay(struct attn_error *error, attn_status status, const struct attn_error *from)
{
    char field[ATTN_ERROR_FIELD_SIZE], message[ATTN_ERROR_MESSAGE_SIZE];
    const attn_status known = status_is_known(status) ? status : ATTN_ERROR_PLUGIN;
    if (error == NULL || status == ATTN_OK) {
        return known;
    }
    if (from->struct_size < sizeof *from) { /* overwritten: its texts are not to be read */
        return error_set(error, known, "", "%s (status %d), without a text", status_text(status),
                         status);
    }
    /* either may be open */
    snprintf(field, sizeof field, "%.*s", (int)sizeof field - 1, from->field);
    snprintf(message, sizeof message, "%.*s", (int)sizeof message - 1, from->message);
    if (!text_is_clean(field, sizeof field)) {
        field[0] = '\0';
    }
    ERROR_IF(!text_is_clean(message, sizeof message), known, field,
             "%s, with a text that is not clean UTF-8", status_text(status));
    return message[0] != '\0' ? error_set_text(error, known, field, message)
                              : error_set(error, known, field, "%s (status %d), without a text",
                                          status_text(status), status);
}

/* NULL: it is not known. */
static const char *text_of(attn_status status)
{
#define STATUS(name, value, text) {value, text},
    static const struct {
        attn_status status;
        const char *text;
    } statuses[] = {ATTN_STATUS_LIST(STATUS)};
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++) {
        if (statuses[i].status == status) {
            return statuses[i].text;
        }
    }
    return NULL;
}

bool status_is_known(attn_status status)
{
    return text_of(status) != NULL;
}

const char *status_text(attn_status status)
{
    const char *text = text_of(status);
    return text != NULL ? text : "unknown status";
}
