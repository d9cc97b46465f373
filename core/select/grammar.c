/* SPDX-License-Identifier: Apache-2.0 */
#include "select/grammar.h"

#include <ctype.h>
#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#include "select/names.h"
#include "util/counts.h"

#define MAX_TEXT 4096 /* bytes of a selection text */
#define MAX_LAYER_INDEX 99999
#define SHOWN 200 /* bytes of the text that an error shows */
#define SPACE " \t\n\v\f\r"

static const char *const where_kinds[] = {
    "full",       "sliding", "chunked",    "decoder",     "encoder", "encoder_only", "cross",
    "mm_encoder", "mla",     "mla_sparse", "static_sink", "gdn",     "indexer",      "compressor"};

/* The text being read. */
struct source {
    const char *text;
    size_t length;
    char *copy; /* which is cut into pieces; a piece's position is its place in it */
    struct arena *arena;
    struct attn_error *error;
};

attn_status rules_error(struct attn_error *error, attn_status status, const char *text,
                        size_t length, size_t position, const char *what)
{
    size_t from = position > SHOWN / 2 ? position - SHOWN / 2 : 0;
    size_t shown = length - from < SHOWN ? length - from : SHOWN;
    return error_set(error, status, "ATTN_BACKEND", "position %zu: %s\n  %.*s\n  %*s^", position,
                     what, (int)shown, text + from, (int)(position - from), "");
}

static attn_status syntax(const struct source *source, const char *at, const char *what)
{
    return rules_error(source->error, ATTN_ERROR_SYNTAX, source->text, source->length,
                       (size_t)(at - source->copy), what);
}

static attn_status no_memory(struct attn_error *error)
{
    return NO_MEMORY("ATTN_BACKEND", "the selection text");
}

/* Without the white space around it. */
static char *trim(char *piece)
{
    piece += strspn(piece, SPACE);
    size_t length = strlen(piece);
    while (length > 0 && strchr(SPACE, piece[length - 1]) != NULL) {
        length--;
    }
    piece[length] = '\0';
    return piece;
}

static size_t count_pieces(const char *text, char separator)
{
    size_t count = 1;
    for (; *text != '\0'; text++) {
        count += *text == separator;
    }
    return count;
}

static bool read_index(char **at, int32_t *index)
{
    char *end = *at;
    const long value = isdigit((unsigned char)**at) ? strtol(*at, &end, 10) : -1;
    if (value < 0 || value > MAX_LAYER_INDEX) {
        return false;
    }
    *index = (int32_t)value;
    *at = end;
    return true;
}

static attn_status parse_layers(const struct source *source, struct rule *rule, char *at)
{
    rule->where = WHERE_LAYERS;
    bool read = read_index(&at, &rule->first);
    rule->last = rule->first;
    if (read && *at == '-') {
        at++;
        read = read_index(&at, &rule->last);
    }
    if (!read) {
        return syntax(source, at, "a layer's index from 0 to 99999 is expected");
    }
    if (*at != '\0') {
        return syntax(source, at, "layers.N or layers.N-M is expected");
    }
    if (rule->last < rule->first) {
        return syntax(source, at - 1, "the range of layers ends before it begins");
    }
    return ATTN_OK;
}

static attn_status parse_where(const struct source *source, struct rule *rule, char *where)
{
    if (strncmp(where, "layers.", 7) == 0) {
        return parse_layers(source, rule, where + 7);
    }
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        if (strcmp(where, name_of(ATTN_NAMES_PHASE, phase)) == 0) {
            rule->where = WHERE_PHASE;
            rule->first = phase;
            return ATTN_OK;
        }
    }
    for (size_t i = 0; i < sizeof where_kinds / sizeof *where_kinds; i++) {
        if (strcmp(where, where_kinds[i]) == 0) {
            rule->where = WHERE_KIND;
            rule->kind = where_kinds[i];
            return ATTN_OK;
        }
    }
    return syntax(
        source, where,
        "layers.N-M, prefill, decode or a layer kind is expected before '=' (full, sliding, "
        "chunked, decoder, encoder, encoder_only, cross, mm_encoder, mla, mla_sparse, "
        "static_sink, gdn, indexer, compressor)");
}

static attn_status parse_name(const struct source *source, struct pattern *pattern,
                              const char *name)
{
    pattern->exclude = *name == '^';
    pattern->text = name + pattern->exclude;
    pattern->position = (size_t)(pattern->text - source->copy);
    if (*pattern->text == '\0') {
        return syntax(source, pattern->text, "a backend's name is expected");
    }
    for (const char *at = pattern->text; *at != '\0'; at++) {
        if (!isalnum((unsigned char)*at) && strchr("_-.*?[]@!", *at) == NULL) {
            return syntax(source, at,
                          "a name has letters, digits, '_', '-', '.', '@' and globs only");
        }
    }
    return ATTN_OK;
}

static attn_status parse_list(const struct source *source, struct rule *rule, char *list)
{
    const size_t length = strlen(list);
    if (length > 0 && list[length - 1] == '?') {
        rule->wish = true;
        list[length - 1] = '\0';
    }
    rule->patterns = arena_array(source->arena, count_pieces(list, ','), sizeof *rule->patterns);
    if (rule->patterns == NULL) {
        return no_memory(source->error);
    }
    while (list != NULL) {
        const char *name = trim(strsep(&list, ","));
        if (strcmp(name, "conformant") == 0) {
            rule->conformant = true;
            continue;
        }
        struct pattern *pattern = &rule->patterns[rule->num_patterns++];
        TRY(parse_name(source, pattern, name));
        rule->num_wanted += !pattern->exclude;
    }
    return ATTN_OK;
}

static attn_status parse_rule(const struct source *source, struct rule *rule, char *text)
{
    if (*text == '\0') {
        return syntax(source, text, "a rule is expected");
    }
    rule->text = arena_string(source->arena, text);
    if (rule->text == NULL) {
        return no_memory(source->error);
    }
    TRY_IF(strchr(text, '=') != NULL, parse_where(source, rule, trim(strsep(&text, "="))));
    return parse_list(source, rule, trim(text));
}

attn_status rules_parse(struct rules *rules, const char *text, size_t length, struct arena *arena,
                        struct attn_error *error)
{
    struct source source = {text, length, NULL, arena, error};
    *rules = (struct rules){NULL, 0};
    ERROR_IF(length > MAX_TEXT, ATTN_ERROR_SYNTAX, "ATTN_BACKEND", "%zu bytes; at most %d", length,
             MAX_TEXT);
    source.copy = arena_string_n(arena, text, length);
    if (source.copy == NULL) {
        return no_memory(error);
    }
    if (strlen(source.copy) < length) {
        return syntax(&source, source.copy + strlen(source.copy), "a NUL is no part of a text");
    }
    char *rest = trim(source.copy);
    const size_t last = strlen(rest);
    if (last == 0) {
        return ATTN_OK;
    }
    if (rest[last - 1] == ';') { /* one trailing separator is tolerated */
        rest[last - 1] = '\0';
    }
    rules->rules = arena_array(arena, count_pieces(rest, ';'), sizeof *rules->rules);
    if (rules->rules == NULL) {
        return no_memory(error);
    }
    int32_t count = 0;
    while (rest != NULL) {
        TRY(parse_rule(&source, &rules->rules[count++], trim(strsep(&rest, ";"))));
    }
    rules->count = count;
    return ATTN_OK;
}

static bool rule_matches(const struct rule *rule, int32_t index,
                         const struct attn_layer_desc *layer, int32_t phase)
{
    switch (rule->where) {
    case WHERE_LAYERS:
        return index >= rule->first && index <= rule->last;
    case WHERE_PHASE:
        return phase == rule->first;
    case WHERE_LAYER_PHASE:
        return index == rule->first && phase == rule->last;
    case WHERE_KIND:
        return strcmp(rule->kind, name_of_layer(layer)) == 0 ||
               (strcmp(rule->kind, "decoder") == 0 && layer->kind == ATTN_LAYER_DECODER &&
                layer->sink_len == 0);
    default:
        return true;
    }
}

const struct rule *rules_find(const struct rules *rules, int32_t layer_index,
                              const struct attn_layer_desc *layer, int32_t phase)
{
    for (int32_t i = rules->count - 1; i >= 0; i--) {
        if (rule_matches(&rules->rules[i], layer_index, layer, phase)) {
            return &rules->rules[i];
        }
    }
    return NULL;
}

bool pattern_fits(const char *pattern, const char *name, const char *variant)
{
    const char *at = strchr(pattern, '@');
    char wanted[256];
    if (at == NULL) {
        return fnmatch(pattern, name, 0) == 0;
    }
    size_t length = (size_t)(at - pattern);
    if (length >= sizeof wanted) {
        return false;
    }
    memcpy(wanted, pattern, length);
    wanted[length] = '\0';
    return fnmatch(wanted, name, 0) == 0 && fnmatch(at + 1, variant, 0) == 0;
}

bool pattern_is_glob(const char *pattern)
{
    return strpbrk(pattern, "*?[") != NULL;
}
