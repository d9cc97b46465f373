/* SPDX-License-Identifier: Apache-2.0 */
#include "shapes.h"

#include <attn/kv_cache.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/names.h"

#define MAX_VALUES 64
#define MAX_SHAPES 4096
#define LAYOUT_OWN (-1)

static const struct {
    const char *name;
    double min, max;
    bool whole;
} parameters[PARAMETER_COUNT] = {
    [PARAMETER_R] = {"r", 1, 65536, true},
    [PARAMETER_L] = {"l", 0, 1 << 24, true},
    [PARAMETER_S] = {"s", 1, 1 << 20, true},
    [PARAMETER_PREFILLS] = {"prefills", 1, 4096, true},
    [PARAMETER_HQ] = {"hq", 1, 4096, true},
    [PARAMETER_HKV] = {"hkv", 1, 4096, true},
    [PARAMETER_D] = {"d", 8, 4096, true},
    [PARAMETER_DV] = {"dv", 0, 4096, true},
    [PARAMETER_BLOCK] = {"block", 0, 65536, true},
    [PARAMETER_LAYOUT] = {"layout", LAYOUT_OWN, ATTN_KV_LAYOUT_HND_ROWS, true},
    [PARAMETER_WINDOW] = {"window", 0, 1 << 24, true},
    [PARAMETER_CHUNK] = {"chunk", 0, 1 << 24, true},
    [PARAMETER_SOFTCAP] = {"softcap", 0, 1e6, false},
    [PARAMETER_SINKS] = {"sinks", 0, 1, true},
    [PARAMETER_ALIBI] = {"alibi", 0, 2, true},
    [PARAMETER_INVARIANT] = {"invariant", 0, 2, true},
    [PARAMETER_CAUSAL] = {"causal", 0, 1, true},
    [PARAMETER_SHUFFLE] = {"shuffle", 0, 1, true},
    [PARAMETER_WRITE] = {"write", 0, 1, true},
    [PARAMETER_ROTATE] = {"rotate", 0, 1, true},
    [PARAMETER_LORA] = {"lora", 8, 4096, true},
    [PARAMETER_ROPE] = {"rope", 8, 1024, true},
    [PARAMETER_NOPE] = {"nope", 8, 1024, true},
    [PARAMETER_ABSORB] = {"absorb", 0, 1, true},
    [PARAMETER_TOPK] = {"topk", 1, 65536, true},
    [PARAMETER_HK] = {"hk", 1, 4096, true},
    [PARAMETER_HV] = {"hv", 1, 4096, true},
    [PARAMETER_DK] = {"dk", 8, 1024, true},
    [PARAMETER_CONV] = {"conv", 0, 64, true},
    [PARAMETER_LAYERS] = {"layers", 1, 4096, true},
    [PARAMETER_SEED] = {"seed", 0, 4294967295.0, true},
};

struct initial {
    enum parameter parameter;
    double value;
};

#define HEADS                                                                                      \
    {PARAMETER_HQ, 32}, {PARAMETER_HKV, 8}, {PARAMETER_D, 128},                                    \
    {                                                                                              \
        PARAMETER_DV, 0                                                                            \
    }
#define PLACE                                                                                      \
    {PARAMETER_BLOCK, 0}, {PARAMETER_LAYOUT, LAYOUT_OWN},                                          \
    {                                                                                              \
        PARAMETER_SHUFFLE, 1                                                                       \
    }
#define TERMS                                                                                      \
    {PARAMETER_WINDOW, 0}, {PARAMETER_CHUNK, 0}, {PARAMETER_SOFTCAP, 0}, {PARAMETER_SINKS, 0},     \
        {PARAMETER_ALIBI, 0},                                                                      \
    {                                                                                              \
        PARAMETER_INVARIANT, 0                                                                     \
    }
#define LATENT                                                                                     \
    {PARAMETER_HQ, 16}, {PARAMETER_LORA, 512}, {PARAMETER_ROPE, 64}, {PARAMETER_NOPE, 128},        \
        {PARAMETER_DV, 128}, {PARAMETER_BLOCK, 0}, {PARAMETER_SHUFFLE, 1},                         \
    {                                                                                              \
        PARAMETER_ABSORB, 0                                                                        \
    }
#define SEED                                                                                       \
    {                                                                                              \
        PARAMETER_SEED, 1                                                                          \
    }
#define ROTATE                                                                                     \
    {                                                                                              \
        PARAMETER_ROTATE, 1                                                                        \
    }
#define END                                                                                        \
    {                                                                                              \
        PARAMETER_COUNT, 0                                                                         \
    }
#define MAX_INITIAL 22

/* A kind takes the parameters that have an initial value here, and no others. */
static const struct {
    const char *name;
    const char *what;
    struct initial initial[MAX_INITIAL];
} kinds[SHAPE_KIND_COUNT] = {
    [SHAPE_DECODE] = {"decode",
                      "s queries over l keys of each request",
                      {{PARAMETER_R, 8},
                       {PARAMETER_L, 4096},
                       {PARAMETER_S, 1},
                       HEADS,
                       PLACE,
                       TERMS,
                       {PARAMETER_WRITE, 0},
                       ROTATE,
                       SEED,
                       END}},
    [SHAPE_PREFILL] = {"prefill",
                       "s queries, causal unless causal=0, over l keys (0: s)",
                       {{PARAMETER_R, 1},
                        {PARAMETER_L, 0},
                        {PARAMETER_S, 2048},
                        HEADS,
                        PLACE,
                        TERMS,
                        {PARAMETER_CAUSAL, 1},
                        {PARAMETER_WRITE, 0},
                        ROTATE,
                        SEED,
                        END}},
    [SHAPE_MIXED] = {"mixed",
                     "r decodes over l keys and prefills of s tokens in one batch",
                     {{PARAMETER_R, 8},
                      {PARAMETER_L, 4096},
                      {PARAMETER_S, 512},
                      {PARAMETER_PREFILLS, 1},
                      HEADS,
                      PLACE,
                      TERMS,
                      {PARAMETER_WRITE, 0},
                      ROTATE,
                      SEED,
                      END}},
    [SHAPE_VARLEN] = {"varlen",
                      "r causal prefills of s / 16 .. s tokens",
                      {{PARAMETER_R, 8},
                       {PARAMETER_S, 2048},
                       HEADS,
                       PLACE,
                       TERMS,
                       {PARAMETER_WRITE, 0},
                       ROTATE,
                       SEED,
                       END}},
    [SHAPE_MLA] =
        {"mla",
         "s queries over l latent rows of each request",
         {{PARAMETER_R, 8}, {PARAMETER_L, 4096}, {PARAMETER_S, 1}, LATENT, ROTATE, SEED, END}},
    [SHAPE_MLA_SPARSE] = {"mla_sparse",
                          "the same over topk rows of the l",
                          {{PARAMETER_R, 8},
                           {PARAMETER_L, 4096},
                           {PARAMETER_S, 1},
                           LATENT,
                           {PARAMETER_TOPK, 2048},
                           ROTATE,
                           SEED,
                           END}},
    [SHAPE_GDN] = {"gdn",
                   "gated delta rule: s tokens of r requests with a state each",
                   {{PARAMETER_R, 8},
                    {PARAMETER_S, 1},
                    {PARAMETER_HK, 16},
                    {PARAMETER_HV, 32},
                    {PARAMETER_DK, 128},
                    {PARAMETER_DV, 128},
                    {PARAMETER_CONV, 4},
                    ROTATE,
                    SEED,
                    END}},
    [SHAPE_WRITE] = {"write",
                     "s keys and values of r requests into the cache",
                     {{PARAMETER_R, 1},
                      {PARAMETER_S, 4096},
                      {PARAMETER_HKV, 8},
                      {PARAMETER_D, 128},
                      {PARAMETER_DV, 0},
                      PLACE,
                      SEED,
                      END}},
    [SHAPE_MERGE] = {"merge",
                     "two outputs of s rows with their LSE into one",
                     {{PARAMETER_S, 4096}, {PARAMETER_HQ, 32}, {PARAMETER_D, 128}, SEED, END}},
    [SHAPE_DISPATCH] = {"dispatch",
                        "what the core adds to the kernel of a small decode",
                        {{PARAMETER_R, 1},
                         {PARAMETER_L, 8},
                         {PARAMETER_HQ, 1},
                         {PARAMETER_HKV, 1},
                         {PARAMETER_D, 64},
                         {PARAMETER_LAYERS, 61},
                         SEED,
                         END}},
};

const char *shape_name(const struct shape *shape)
{
    return kinds[shape->kind].name;
}

const char *parameter_name(enum parameter parameter)
{
    return parameters[parameter].name;
}

/* NULL: the kind does not take it. */
static const struct initial *find_initial(enum shape_kind_code kind, enum parameter parameter)
{
    const struct initial *initial = kinds[kind].initial;
    while (initial->parameter != PARAMETER_COUNT && initial->parameter != parameter) {
        initial++;
    }
    return initial->parameter == parameter ? initial : NULL;
}

bool shape_takes(enum shape_kind_code kind, enum parameter parameter)
{
    return find_initial(kind, parameter) != NULL;
}

static double initial_value(enum shape_kind_code kind, enum parameter parameter)
{
    const struct initial *initial = find_initial(kind, parameter);
    return initial != NULL ? initial->value : 0;
}

static void value_text(enum parameter parameter, double value, char *text, size_t size)
{
    if (parameter == PARAMETER_LAYOUT) {
        snprintf(text, size, "%s", value < 0 ? "own" : layout_name((int32_t)value));
    } else {
        snprintf(text, size, "%.10g", value);
    }
}

void parameter_text(const struct shape *shape, enum parameter parameter, char *text, size_t size)
{
    value_text(parameter, shape->value[parameter], text, size);
}

void shape_text(const struct shape *shape, char *text, size_t size)
{
    size_t used = (size_t)snprintf(text, size, "%s", shape_name(shape));
    char mark = ':';
    for (enum parameter p = 0; p < PARAMETER_COUNT; p++) {
        char value[32];
        if (!shape_takes(shape->kind, p) || shape->value[p] == initial_value(shape->kind, p)) {
            continue;
        }
        parameter_text(shape, p, value, sizeof value);
        if (used < size) {
            used += (size_t)snprintf(text + used, size - used, "%c%s=%s", mark, parameters[p].name,
                                     value);
        }
        mark = ',';
    }
}

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

void shapes_finish(struct shape_list *list)
{
    free(list->shapes);
    *list = (struct shape_list){NULL, 0};
}

void shapes_describe(FILE *file)
{
    for (enum shape_kind_code kind = 0; kind < SHAPE_KIND_COUNT; kind++) {
        fprintf(file, "  %-10s %s\n            ", kinds[kind].name, kinds[kind].what);
        for (const struct initial *i = kinds[kind].initial; i->parameter != PARAMETER_COUNT; i++) {
            char value[32];
            value_text(i->parameter, i->value, value, sizeof value);
            fprintf(file, " %s=%s", parameters[i->parameter].name, value);
        }
        fputc('\n', file);
    }
}
