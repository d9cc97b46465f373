/* SPDX-License-Identifier: Apache-2.0 */
#include "json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "util/safe_text.h"

static struct json *make(enum json_type type, double number)
{
    struct json *value = command_calloc(1, sizeof *value);
    value->type = type;
    value->number = number;
    return value;
}

static char *copy(const char *text)
{
    return strcpy(command_calloc(strlen(text) + 1, 1), text);
}

struct json *json_object(void)
{
    return make(JSON_OBJECT, 0);
}

struct json *json_array(void)
{
    return make(JSON_ARRAY, 0);
}

struct json *json_null(void)
{
    return make(JSON_NULL, 0);
}

struct json *json_bool(bool value)
{
    return make(JSON_BOOL, value);
}

struct json *json_number(double number)
{
    return isfinite(number) ? make(JSON_NUMBER, number) : json_null();
}

struct json *json_raw(const char *text)
{
    struct json *value = make(JSON_RAW, 0);
    value->text = copy(text);
    return value;
}

struct json *json_string(const char *text)
{
    struct json *value = make(text != NULL ? JSON_STRING : JSON_NULL, 0);
    value->text = text != NULL ? copy(text) : NULL;
    return value;
}

void json_destroy(struct json *value)
{
    if (value == NULL) {
        return;
    }
    for (struct json *item = value->first, *next; item != NULL; item = next) {
        next = item->next;
        json_destroy(item);
    }
    free(value->name);
    free(value->text);
    free(value);
}

struct json *json_push(struct json *array, struct json *value)
{
    if (array == NULL) {
        json_destroy(value);
        return NULL;
    }
    if (array->last != NULL) {
        array->last->next = value;
    } else {
        array->first = value;
    }
    return array->last = value;
}

struct json *json_add(struct json *object, const char *name, struct json *value)
{
    value->name = copy(name);
    return json_push(object, value);
}

struct json *json_get(const struct json *object, const char *name)
{
    struct json *item = object != NULL ? object->first : NULL;
    while (item != NULL && (item->name == NULL || strcmp(item->name, name) != 0)) {
        item = item->next;
    }
    return item;
}

const char *json_text(const struct json *object, const char *name)
{
    const struct json *item = json_get(object, name);
    if (item == NULL || item->type != JSON_STRING) {
        return "-";
    }
    text_make_safe(item->text, false); /* it is asked for to be shown */
    return item->text;
}

double json_value(const struct json *object, const char *name)
{
    const struct json *item = json_get(object, name);
    return item != NULL ? item->number : 0;
}

int32_t json_count(const struct json *value)
{
    int32_t count = 0;
    for (const struct json *item = value != NULL ? value->first : NULL; item != NULL;
         item = item->next) {
        count++;
    }
    return count;
}

static void print_string(FILE *out, const char *text)
{
    putc('"', out);
    for (const char *c = text; *c != '\0';) {
        const size_t length = utf8_length(c);
        if (length == 0) {
            fputs("\\ufffd", out);
        } else if (*c == '"' || *c == '\\') {
            fprintf(out, "\\%c", *c);
        } else if (utf8_is_control(c)) {
            fprintf(out, "\\u%04x", (unsigned char)c[length - 1]);
        } else {
            fwrite(c, 1, length, out);
        }
        c += length > 0 ? length : 1;
    }
    putc('"', out);
}

/* The shortest decimal number that reads back as the same double. */
static void print_number(FILE *out, double number)
{
    char text[32];
    for (int32_t digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, number);
        if (strtod(text, NULL) == number) {
            break;
        }
    }
    fputs(text, out);
}

static void print_value(FILE *out, const struct json *value, int32_t depth)
{
    switch (value->type) {
    case JSON_NULL:
        fputs("null", out);
        return;
    case JSON_BOOL:
        fputs(value->number != 0 ? "true" : "false", out);
        return;
    case JSON_NUMBER:
        print_number(out, value->number);
        return;
    case JSON_STRING:
        print_string(out, value->text);
        return;
    case JSON_RAW:
        fputs(value->text, out);
        return;
    default:
        break;
    }
    putc(value->type == JSON_OBJECT ? '{' : '[', out);
    for (const struct json *item = value->first; item != NULL; item = item->next) {
        fprintf(out, "%s\n%*s", item != value->first ? "," : "", 2 * (depth + 1), "");
        if (value->type == JSON_OBJECT) {
            print_string(out, item->name);
            fputs(": ", out);
        }
        print_value(out, item, depth + 1);
    }
    if (value->first != NULL) {
        fprintf(out, "\n%*s", 2 * depth, "");
    }
    putc(value->type == JSON_OBJECT ? '}' : ']', out);
}

bool json_equal(const struct json *a, const struct json *b)
{
    if (a == NULL || b == NULL) {
        return a == b;
    }
    if (a->type != b->type || a->number != b->number ||
        (a->type == JSON_STRING && strcmp(a->text, b->text) != 0)) {
        return false;
    }
    const struct json *x = a->first, *y = b->first;
    for (; x != NULL && y != NULL; x = x->next, y = y->next) {
        bool named = a->type == JSON_OBJECT;
        if ((named && strcmp(x->name, y->name) != 0) || !json_equal(x, y)) {
            return false;
        }
    }
    return x == y;
}

bool json_write(FILE *out, const struct json *value, int32_t depth)
{
    print_value(out, value, depth);
    return ferror(out) == 0;
}

bool json_print(const struct json *root)
{
    const bool printed = json_write(stdout, root, 0);
    putchar('\n');
    return printed;
}
