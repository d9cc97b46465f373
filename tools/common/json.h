/* SPDX-License-Identifier: Apache-2.0 */
/* JSON that a tool writes: a tree of values made, read back and printed. Parsing is cJSON's, in the
 * tools that read JSON. */
#ifndef TOOLS_COMMON_JSON_H
#define TOOLS_COMMON_JSON_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum json_type {
    JSON_NULL,
    JSON_BOOL,
    JSON_NUMBER,
    JSON_STRING,
    JSON_ARRAY,
    JSON_OBJECT,
    JSON_RAW /* a value in its printed form, by json_write */
};

/* A value. Members of an object and items of an array are a list in the order in which they were
 * added. Read only for whoever did not make it. */
struct json {
    enum json_type type;
    char *name;    /* name of a member of an object; else NULL */
    char *text;    /* text of a string, in its printed form */
    double number; /* value of a number; a boolean has 0 or 1 */
    struct json *first, *last, *next;
};

/* New values, owned by the caller until they are added. A number that JSON cannot hold (not finite)
 * becomes null; json_string(NULL) too. */
struct json *json_object(void);
struct json *json_array(void);
struct json *json_string(const char *text);
struct json *json_number(double number);
struct json *json_bool(bool value);
struct json *json_null(void);
struct json *json_raw(const char *text);

/* Hands a value over to an object or array and gives it back, to go on with it. NULL as object is
 * passed over: the value is destroyed. */
struct json *json_add(struct json *object, const char *name, struct json *value);
struct json *json_push(struct json *array, struct json *value);

/* Goes over members or items: `item` is a pointer to const struct json. */
#define JSON_EACH(item, value)                                                                     \
    for ((item) = (value) != NULL ? (value)->first : NULL; (item) != NULL; (item) = (item)->next)

/* A member by its name, or NULL. */
struct json *json_get(const struct json *object, const char *name);
/* The text of a member that is a string, else "-". */
const char *json_text(const struct json *object, const char *name);
/* The number of a member that is one (a boolean: 0 or 1), else 0. */
double json_value(const struct json *object, const char *name);
/* How many members or items there are; 0 for NULL. */
int32_t json_count(const struct json *value);

/* Whether two values print alike; their own names in what holds them do not count. */
bool json_equal(const struct json *a, const struct json *b);

/* Prints the document to stdout with a newline after it; false if it could not be written. Bytes
 * that are not valid UTF-8 are printed as U+FFFD. */
bool json_print(const struct json *root);

/* The same of any value, without the newline, as it stands `depth` values deep in a document. */
bool json_write(FILE *out, const struct json *value, int32_t depth);

void json_destroy(struct json *value); /* with all below it; accepts NULL */

#endif
