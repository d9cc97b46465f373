/* SPDX-License-Identifier: Apache-2.0 */
/* Shapes and sweeps out of the text of `--shape`. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/names.h"
#include "shape_tables.h"

#define MAX_VALUES 64
#define MAX_SHAPES 4096

/* The values of one parameter in a sweep. */
struct values {
    double items[MAX_VALUES];
    int32_t count;
};

static bool say_range(enum parameter p, const char *text, char *message, size_t size)
{
    if (p == PARAMETER_LAYOUT) {
        snprintf(message, size,
                 "layout: '%s' is not one of own, nhd, hnd, nhd_inner, hnd_inner, hnd_rows", text);
    } else {
        snprintf(
            message, size,
            "%s: '%s' is not %s from %.10g to %.10g, a list a+b+c, or a range a..b or a..b/step",
            parameters[p].name, text, parameters[p].whole ? "a whole number" : "a number",
            parameters[p].min, parameters[p].max);
    }
    return false;
}

static bool add_value(struct values *values, enum parameter p, double value)
{
    bool fits = isfinite(value) && value >= parameters[p].min && value <= parameters[p].max &&
                (!parameters[p].whole || value == floor(value));
    if (!fits || values->count == MAX_VALUES) {
        return false;
    }
    values->items[values->count++] = value;
    return true;
}

/* "a", "a..b" or "a..b/step". */
static bool add_item(struct values *values, enum parameter p, char *item)
{
    char *end;
    char *range = strstr(item, "..");
    if (p == PARAMETER_LAYOUT) {
        int32_t layout = strcmp(item, "own") == 0 ? LAYOUT_OWN : layout_of_name(item);
        bool known = layout >= 0 || strcmp(item, "own") == 0;
        return known && add_value(values, p, layout);
    }
    if (range == NULL) {
        double value = strtod(item, &end);
        return end != item && *end == '\0' && add_value(values, p, value);
    }
    *range = '\0';
    double first = strtod(item, &end);
    if (end == item || *end != '\0') {
        return false;
    }
    char *rest = range + 2;
    double last = strtod(rest, &end);
    double step = 0;
    if (end != rest && *end == '/') {
        rest = end + 1;
        step = strtod(rest, &end);
        if (!(step > 0)) {
            return false;
        }
    }
    if (end == rest || *end != '\0' || last < first || (step == 0 && first <= 0)) {
        return false;
    }
    for (double value = first; value <= last; value = step > 0 ? value + step : 2 * value) {
        if (!add_value(values, p, value)) {
            return false;
        }
    }
    return true;
}

static bool parse_values(struct values *values, enum parameter p, char *text, char *message,
                         size_t size)
{
    char whole[64];
    snprintf(whole, sizeof whole, "%s", text);
    values->count = 0;
    for (char *item = text; item != NULL;) {
        char *next = strchr(item, '+');
        if (next != NULL) {
            *next++ = '\0';
        }
        if (!add_item(values, p, item)) {
            return say_range(p, whole, message, size);
        }
        item = next;
    }
    return true;
}

static bool say_unknown(enum shape_kind_code kind, const char *key, char *message, size_t size)
{
    size_t used =
        (size_t)snprintf(message, size, "%s has no parameter '%s'; it has ", kinds[kind].name, key);
    bool any = false;
    for (enum parameter p = 0; p < PARAMETER_COUNT && used < size; p++) {
        if (shape_takes(kind, p)) {
            used += (size_t)snprintf(message + used, size - used, "%s%s", any ? ", " : "",
                                     parameters[p].name);
            any = true;
        }
    }
    return false;
}

static bool parse_pair(enum shape_kind_code kind, char *pair, struct values *all, char *message,
                       size_t size)
{
    char *equals = strchr(pair, '=');
    if (equals == NULL) {
        snprintf(message, size, "'%s' is not key=value", pair);
        return false;
    }
    *equals = '\0';
    for (enum parameter p = 0; p < PARAMETER_COUNT; p++) {
        if (shape_takes(kind, p) && strcmp(parameters[p].name, pair) == 0) {
            return parse_values(&all[p], p, equals + 1, message, size);
        }
    }
    return say_unknown(kind, pair, message, size);
}

/* What no single parameter's range can say. */
static bool fits_together(const struct shape *shape, char *message, size_t size)
{
    int32_t l = shape_int(shape, PARAMETER_L), s = shape_int(shape, PARAMETER_S);
    int32_t hq = shape_int(shape, PARAMETER_HQ), hkv = shape_int(shape, PARAMETER_HKV);
    bool lengths = shape_takes(shape->kind, PARAMETER_L) && shape_takes(shape->kind, PARAMETER_S);
    if (shape_takes(shape->kind, PARAMETER_HKV) && shape_takes(shape->kind, PARAMETER_HQ) &&
        hq % hkv != 0) {
        snprintf(message, size, "hq: %d is not a multiple of hkv, %d", hq, hkv);
        return false;
    }
    if (lengths && shape->kind != SHAPE_MIXED && l < s &&
        (l != 0 || shape->kind != SHAPE_PREFILL)) {
        snprintf(message, size, "l: %d keys are fewer than s, %d queries", l, s);
        return false;
    }
    if (lengths && shape->kind == SHAPE_MIXED && l < 1) {
        snprintf(message, size, "l: 0; a decode has 1 key or more");
        return false;
    }
    if (shape->kind == SHAPE_GDN &&
        shape_int(shape, PARAMETER_HV) % shape_int(shape, PARAMETER_HK) != 0) {
        snprintf(message, size, "hv: %d is not a multiple of hk, %d",
                 shape_int(shape, PARAMETER_HV), shape_int(shape, PARAMETER_HK));
        return false;
    }
    return true;
}

static bool append(struct shape_list *list, const struct shape *shape, char *message, size_t size)
{
    struct shape *larger;
    if (!fits_together(shape, message, size)) {
        return false;
    }
    if (list->count == MAX_SHAPES) {
        snprintf(message, size, "more than %d shapes", MAX_SHAPES);
        return false;
    }
    larger = realloc(list->shapes, sizeof *larger * (size_t)(list->count + 1));
    if (larger == NULL) {
        snprintf(message, size, "no memory for the shapes");
        return false;
    }
    list->shapes = larger;
    list->shapes[list->count++] = *shape;
    return true;
}

/* The product of all values, the last parameter fastest. */
static bool expand(struct shape_list *list, enum shape_kind_code kind, const struct values *all,
                   char *message, size_t size)
{
    int32_t at[PARAMETER_COUNT] = {0};
    for (;;) {
        struct shape shape = {.kind = kind};
        for (enum parameter p = 0; p < PARAMETER_COUNT; p++) {
            shape.value[p] = all[p].items[at[p]];
        }
        if (!append(list, &shape, message, size)) {
            return false;
        }
        int32_t p = PARAMETER_COUNT - 1;
        while (p >= 0 && ++at[p] == all[p].count) {
            at[p--] = 0;
        }
        if (p < 0) {
            return true;
        }
    }
}

bool shapes_parse(struct shape_list *list, const char *text, char *message, size_t size)
{
    struct values all[PARAMETER_COUNT];
    enum shape_kind_code kind;
    size_t length = strcspn(text, ":");
    for (kind = 0; kind < SHAPE_KIND_COUNT; kind++) {
        if (strlen(kinds[kind].name) == length && strncmp(kinds[kind].name, text, length) == 0) {
            break;
        }
    }
    if (kind == SHAPE_KIND_COUNT) {
        size_t used = (size_t)snprintf(message, size, "no shape is named '%.*s'; there are",
                                       (int)length, text);
        for (kind = 0; kind < SHAPE_KIND_COUNT && used < size; kind++) {
            used += (size_t)snprintf(message + used, size - used, "%s %s", kind ? "," : "",
                                     kinds[kind].name);
        }
        return false;
    }
    for (enum parameter p = 0; p < PARAMETER_COUNT; p++) {
        all[p] = (struct values){{initial_value(kind, p)}, 1};
    }
    char *copy = strdup(text[length] == ':' ? text + length + 1 : "");
    if (copy == NULL) {
        snprintf(message, size, "no memory for the shapes");
        return false;
    }
    bool ok = true;
    for (char *pair = copy; ok && text[length] == ':' && pair != NULL;) {
        char *next = strchr(pair, ',');
        if (next != NULL) {
            *next++ = '\0';
        }
        ok = parse_pair(kind, pair, all, message, size);
        pair = next;
    }
    free(copy);
    return ok && expand(list, kind, all, message, size);
}
