/* SPDX-License-Identifier: Apache-2.0 */
/* The shapes, their parameters, and sweeps over them out of the text of `--shape`. */
#include "shapes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "common/names.h"

#define LAYOUT_OWN (-1)
#define MAX_VALUES 64
#define MAX_SHAPES 4096

static const struct {
    const char *name;
    double min, max;
} parameters[PARAMETER_COUNT] = {
#define SHAPE_ROW(id, name, from, to) {name, from, to},
    SHAPE_PARAMETERS(SHAPE_ROW)};

#define HEADS "hq=32 hkv=8 d=128 dv=0 "
#define PLACE "block=0 layout=own shuffle=1 "
#define TERMS "window=0 chunk=0 softcap=0 sinks=0 alibi=0 q8=0 invariant=0 "
#define LATENT "hq=16 lora=512 rope=64 nope=128 dv=128 block=0 shuffle=1 absorb=0 invariant=0 "

static const struct {
    const char *name, *what;
    const char *initial; /* the parameters that it takes, with their values */
} kinds[SHAPE_KIND_COUNT] = {
    [SHAPE_DECODE] = {"decode", "s queries over l keys of each request",
                      "r=8 l=4096 s=1 skew=0 " HEADS PLACE TERMS "tree=0 write=0 rotate=1 seed=1"},
    [SHAPE_PREFILL] = {"prefill", "s queries, causal unless causal=0, over l keys (0: s)",
                       "r=1 l=0 s=2048 " HEADS PLACE TERMS "causal=1 write=0 rotate=1 seed=1"},
    [SHAPE_MIXED] = {"mixed", "r decodes over l keys and prefills of s tokens in one batch",
                     "r=8 l=4096 s=512 prefills=1 " HEADS PLACE TERMS "write=0 rotate=1 seed=1"},
    [SHAPE_VARLEN] = {"varlen", "r causal prefills of s / 16 .. s tokens",
                      "r=8 s=2048 " HEADS PLACE TERMS "write=0 rotate=1 seed=1"},
    [SHAPE_MLA] = {"mla", "s queries over l latent rows of each request",
                   "r=8 l=4096 s=1 " LATENT "rotate=1 seed=1"},
    [SHAPE_MLA_SPARSE] = {"mla_sparse", "the same over topk rows of the l",
                          "r=8 l=4096 s=1 " LATENT "topk=2048 rotate=1 seed=1"},
    [SHAPE_COMPRESSED] = {"compressed",
                          "s queries over a window of the l latent rows and, in the same softmax, "
                          "over topk rows of ratio tokens each",
                          "r=8 l=16384 s=1 hq=64 lora=512 block=64 shuffle=1 window=128 sinks=1 "
                          "topk=512 all=0 ratio=4 rotate=1 seed=1"},
    [SHAPE_SPARSE] =
        {"sparse",
         "s queries over the keys of topk entries of grain keys each, of l; lists=1 or "
         "hkv for a token, and the same for share tokens",
         "r=8 l=16384 s=1 hq=64 hkv=4 d=128 dv=0 " PLACE
         "topk=16 grain=128 lists=4 share=1 rotate=1 seed=1"},
    [SHAPE_INDEX] =
        {"index",
         "an indexer: s queries of hq heads over rows of ratio tokens each, of l; the "
         "topk best entries of pool rows in each list",
         "r=8 l=16384 s=1 hq=64 d=128 block=0 shuffle=1 topk=2048 lists=1 ratio=1 pool=1 "
         "relu=1 weights=1 rotate=1 seed=1"},
    [SHAPE_TOP_K] =
        {"top_k", "the same, of queries that share their rows, so that choosing takes longest",
         "r=1 l=131072 s=64 hq=1 d=64 block=0 shuffle=1 topk=2048 lists=1 ratio=1 pool=1 "
         "relu=0 weights=0 rotate=1 seed=1"},
    [SHAPE_GDN] =
        {"gdn",
         "s tokens of r requests with a state each, of rule 0 (gated delta), 1 (KDA), "
         "2 (Mamba2) or 3 (lightning)",
         "r=8 s=1 hk=16 hv=32 dk=128 dv=128 conv=4 rule=0 state_bits=32 philox=0 replay=0 "
         "drafts=0 cursor=-1 invariant=0 rotate=1 seed=1"},
    [SHAPE_WRITE] = {"write", "s keys and values of r requests into the cache",
                     "r=1 s=4096 hkv=8 d=128 dv=0 " PLACE "seed=1"},
    [SHAPE_MERGE] = {"merge", "two outputs of s rows with their LSE into one",
                     "s=4096 hq=32 d=128 seed=1"},
    [SHAPE_DISPATCH] = {"dispatch", "what the core adds to the kernel of a small decode",
                        "r=1 l=8 s=1 hq=1 hkv=1 d=64 layout=own write=0 seed=1"},
};

const char *shape_name(const struct bench_shape *shape)
{
    return kinds[shape->kind].name;
}

const char *parameter_name(enum parameter parameter)
{
    return parameters[parameter].name;
}

/* The text of a kind's value, to the next space; NULL: it does not take the parameter. */
static const char *find_initial(enum shape_kind_code kind, enum parameter parameter)
{
    const char *name = parameters[parameter].name, *at = kinds[kind].initial;
    size_t length = strlen(name);
    while (at != NULL && (strncmp(at, name, length) != 0 || at[length] != '=')) {
        at = strchr(at, ' ');
        at = at != NULL ? at + 1 : NULL;
    }
    return at != NULL ? at + length + 1 : NULL;
}

bool shape_takes(enum shape_kind_code kind, enum parameter parameter)
{
    return find_initial(kind, parameter) != NULL;
}

/* 0 where the kind does not take it. */
static double initial_value(enum shape_kind_code kind, enum parameter parameter)
{
    const char *text = find_initial(kind, parameter);
    return text == NULL ? 0 : parameter == PARAMETER_LAYOUT ? LAYOUT_OWN : strtod(text, NULL);
}

void parameter_text(const struct bench_shape *shape, enum parameter parameter, char *text,
                    size_t size)
{
    double value = shape->value[parameter];
    if (parameter == PARAMETER_LAYOUT) {
        snprintf(text, size, "%s", value < 0 ? "own" : layout_name((int32_t)value));
    } else {
        snprintf(text, size, "%.10g", value);
    }
}

void shape_text(const struct bench_shape *shape, char *text, size_t size)
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

void shapes_finish(struct shape_list *list)
{
    free(list->shapes);
    *list = (struct shape_list){NULL, 0};
}

void shapes_describe(FILE *file)
{
    for (enum shape_kind_code kind = 0; kind < SHAPE_KIND_COUNT; kind++) {
        fprintf(file, "  %-10s %s\n             %s\n", kinds[kind].name, kinds[kind].what,
                kinds[kind].initial);
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
            parameters[p].name, text, p != PARAMETER_SOFTCAP ? "a whole number" : "a number",
            parameters[p].min, parameters[p].max);
    }
    return false;
}

static bool add_value(struct values *values, enum parameter p, double value)
{
    bool fits = isfinite(value) && value >= parameters[p].min && value <= parameters[p].max &&
                (p == PARAMETER_SOFTCAP || value == floor(value));
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
    for (char *item; (item = strsep(&text, "+")) != NULL;) {
        if (!add_item(values, p, item)) {
            return say_range(p, whole, message, size);
        }
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
static bool fits_together(const struct bench_shape *shape, char *message, size_t size)
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
    const int32_t lists = shape_int(shape, PARAMETER_LISTS);
    if ((shape->kind == SHAPE_SPARSE && lists != 1 && lists != hkv) ||
        ((shape->kind == SHAPE_INDEX || shape->kind == SHAPE_TOP_K) && hq % lists != 0)) {
        snprintf(message, size, "lists: %d; %s", lists,
                 shape->kind == SHAPE_SPARSE ? "1 or hkv" : "what divides hq");
        return false;
    }
    if (shape->kind == SHAPE_GDN &&
        shape_int(shape, PARAMETER_HV) % shape_int(shape, PARAMETER_HK) != 0) {
        snprintf(message, size, "hv: %d is not a multiple of hk, %d",
                 shape_int(shape, PARAMETER_HV), shape_int(shape, PARAMETER_HK));
        return false;
    }
    const int32_t bits = shape_int(shape, PARAMETER_STATE_BITS);
    if (shape->kind == SHAPE_GDN && bits != 16 && bits != 32) {
        snprintf(message, size, "state_bits: %d; 16 (bf16) or 32", bits);
        return false;
    }
    if (shape->kind == SHAPE_GDN && bits != 16 && shape_int(shape, PARAMETER_PHILOX) > 0) {
        snprintf(message, size, "philox: %d; 0 with state_bits %d",
                 shape_int(shape, PARAMETER_PHILOX), bits);
        return false;
    }
    return true;
}

static bool append(struct shape_list *list, const struct bench_shape *shape, char *message,
                   size_t size)
{
    if (!fits_together(shape, message, size)) {
        return false;
    }
    if (list->count == MAX_SHAPES) {
        snprintf(message, size, "more than %d shapes", MAX_SHAPES);
        return false;
    }
    list->shapes = command_realloc(list->shapes, (size_t)list->count + 1, sizeof *list->shapes);
    list->shapes[list->count++] = *shape;
    return true;
}

/* The product of all values, the last parameter fastest. */
static bool expand(struct shape_list *list, enum shape_kind_code kind, const struct values *all,
                   char *message, size_t size)
{
    int32_t at[PARAMETER_COUNT] = {0};
    for (;;) {
        struct bench_shape shape = {.kind = kind};
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
    char *copy = command_calloc(strlen(text) + 1, 1);
    char *pair, *rest = text[length] == ':' ? strcpy(copy, text + length + 1) : NULL;
    bool ok = true;
    while (ok && (pair = strsep(&rest, ",")) != NULL) {
        ok = parse_pair(kind, pair, all, message, size);
    }
    free(copy);
    return ok && expand(list, kind, all, message, size);
}
