/* SPDX-License-Identifier: Apache-2.0 */
#include "select/grammar.h"

#include <ctype.h>
#include <fnmatch.h>
#include <string.h>

#include "select/names.h"
#include "util/counts.h"

#define MAX_TEXT 4096 /* of a selection text */
#define MAX_LAYER_INDEX 99999
#define SHOWN 200 /* bytes of the text that an error shows */

static const char *const where_kinds[] = {
    "full",       "sliding", "chunked",    "decoder",     "encoder", "encoder_only", "cross",
    "mm_encoder", "mla",     "mla_sparse", "static_sink", "gdn",     "indexer"};

/* A piece of the text being read. */
struct span {
    const char *whole;
    size_t length; /* of the whole */
    size_t begin;
    size_t end;
};

attn_status rules_error(struct attn_error *error, attn_status status, const char *text,
                        size_t length, size_t position, const char *what)
{
    size_t from = position > SHOWN / 2 ? position - SHOWN / 2 : 0;
    size_t shown = length - from < SHOWN ? length - from : SHOWN;
    return error_set(error, status, "ATTN_BACKEND", "position %zu: %s\n  %.*s\n  %*s^", position,
                     what, (int)shown, text + from, (int)(position - from), "");
}

static attn_status syntax(struct attn_error *error, const struct span *span, size_t position,
                          const char *what)
{
    return rules_error(error, ATTN_ERROR_SYNTAX, span->whole, span->length, position, what);
}

static struct span trimmed(struct span span)
{
    while (span.begin < span.end && isspace((unsigned char)span.whole[span.begin])) {
        span.begin++;
    }
    while (span.end > span.begin && isspace((unsigned char)span.whole[span.end - 1])) {
        span.end--;
    }
    return span;
}

/* The part up to the next `separator` (or the end) and, in *rest, what follows it. */
static struct span split(struct span span, char separator, struct span *rest, bool *found)
{
    const char *at = memchr(span.whole + span.begin, separator, span.end - span.begin);
    struct span head = span;
    *rest = span;
    *found = at != NULL;
    if (at != NULL) {
        head.end = (size_t)(at - span.whole);
        rest->begin = head.end + 1;
    } else {
        rest->begin = span.end;
    }
    return head;
}

static bool equals(struct span span, const char *word)
{
    size_t length = span.end - span.begin;
    return strlen(word) == length && memcmp(span.whole + span.begin, word, length) == 0;
}

static bool read_index(struct span *span, int32_t *index)
{
    size_t start = span->begin;
    *index = 0;
    while (span->begin < span->end && isdigit((unsigned char)span->whole[span->begin])) {
        *index = *index * 10 + (span->whole[span->begin++] - '0');
        if (*index > MAX_LAYER_INDEX) {
            span->begin = start;
            return false;
        }
    }
    return span->begin > start;
}

static attn_status parse_layers(struct rule *rule, struct span span, struct attn_error *error)
{
    span.begin += strlen("layers.");
    rule->where = WHERE_LAYERS;
    if (!read_index(&span, &rule->first)) {
        return syntax(error, &span, span.begin, "a layer's index from 0 to 99999 is expected");
    }
    rule->last = rule->first;
    if (span.begin < span.end && span.whole[span.begin] == '-') {
        span.begin++;
        if (!read_index(&span, &rule->last)) {
            return syntax(error, &span, span.begin, "a layer's index from 0 to 99999 is expected");
        }
    }
    if (span.begin != span.end) {
        return syntax(error, &span, span.begin, "layers.N or layers.N-M is expected");
    }
    if (rule->last < rule->first) {
        return syntax(error, &span, span.begin - 1, "the range of layers ends before it begins");
    }
    return ATTN_OK;
}

static attn_status parse_where(struct rule *rule, struct span span, struct attn_error *error)
{
    span = trimmed(span);
    if (span.end - span.begin >= 7 && memcmp(span.whole + span.begin, "layers.", 7) == 0) {
        return parse_layers(rule, span, error);
    }
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        if (equals(span, name_of_phase(phase))) {
            rule->where = WHERE_PHASE;
            rule->first = phase;
            return ATTN_OK;
        }
    }
    for (size_t i = 0; i < sizeof where_kinds / sizeof *where_kinds; i++) {
        if (equals(span, where_kinds[i])) {
            rule->where = WHERE_KIND;
            rule->kind = where_kinds[i];
            return ATTN_OK;
        }
    }
    return syntax(
        error, &span, span.begin,
        "layers.N-M, prefill, decode or a layer kind is expected before '=' (full, sliding, "
        "chunked, decoder, encoder, encoder_only, cross, mm_encoder, mla, mla_sparse, "
        "static_sink, gdn, indexer)");
}

static bool is_name_byte(char c)
{
    return isalnum((unsigned char)c) || strchr("_-.*?[]@!", c) != NULL;
}

static attn_status parse_name(struct pattern *pattern, struct span span, struct arena *arena,
                              struct attn_error *error)
{
    span = trimmed(span);
    pattern->exclude = span.begin < span.end && span.whole[span.begin] == '^';
    span.begin += pattern->exclude;
    pattern->position = span.begin;
    if (span.begin == span.end) {
        return syntax(error, &span, span.begin, "a backend's name is expected");
    }
    for (size_t i = span.begin; i < span.end; i++) {
        if (span.whole[i] == '\0' || !is_name_byte(span.whole[i])) {
            return syntax(error, &span, i,
                          "a name has letters, digits, '_', '-', '.', '@' and globs only");
        }
    }
    pattern->text = arena_string_n(arena, span.whole + span.begin, span.end - span.begin);
    return pattern->text != NULL ? ATTN_OK : NO_MEMORY("ATTN_BACKEND", "the selection text");
}

static attn_status parse_list(struct rule *rule, struct span span, struct arena *arena,
                              struct attn_error *error)
{
    int32_t count = 1;
    bool more = true;
    span = trimmed(span);
    if (span.begin < span.end && span.whole[span.end - 1] == '?') {
        rule->wish = true;
        span.end--;
    }
    for (size_t i = span.begin; i < span.end; i++) {
        count += span.whole[i] == ',';
    }
    rule->patterns = arena_array(arena, (size_t)count, sizeof *rule->patterns);
    if (rule->patterns == NULL) {
        return NO_MEMORY("ATTN_BACKEND", "the selection text");
    }
    while (more) {
        struct span rest;
        struct span name = split(span, ',', &rest, &more);
        if (equals(trimmed(name), "conformant")) {
            rule->conformant = true;
            span = rest;
            continue;
        }
        struct pattern *pattern = &rule->patterns[rule->num_patterns++];
        TRY(parse_name(pattern, name, arena, error));
        rule->num_wanted += !pattern->exclude;
        span = rest;
    }
    return ATTN_OK;
}

static attn_status parse_rule(struct rule *rule, struct span span, struct arena *arena,
                              struct attn_error *error)
{
    struct span list;
    bool has_where;
    span = trimmed(span);
    if (span.begin == span.end) {
        return syntax(error, &span, span.begin, "a rule is expected");
    }
    struct span where = split(span, '=', &list, &has_where);
    rule->text = arena_string_n(arena, span.whole + span.begin, span.end - span.begin);
    if (rule->text == NULL) {
        return NO_MEMORY("ATTN_BACKEND", "the selection text");
    }
    if (has_where) {
        TRY(parse_where(rule, where, error));
    } else {
        list = where;
    }
    return parse_list(rule, list, arena, error);
}

attn_status rules_parse(struct rules *rules, const char *text, size_t length, struct arena *arena,
                        struct attn_error *error)
{
    struct span span = {text, length, 0, length};
    int32_t count = 1;
    bool more = true;
    *rules = (struct rules){NULL, 0};
    if (length > MAX_TEXT) {
        return error_set(error, ATTN_ERROR_SYNTAX, "ATTN_BACKEND", "%zu bytes; at most %d", length,
                         MAX_TEXT);
    }
    struct span content = trimmed(span);
    if (content.begin == content.end) {
        return ATTN_OK;
    }
    if (text[content.end - 1] == ';') { /* one trailing separator is tolerated */
        span.end = content.end - 1;
    }
    for (size_t i = 0; i < span.end; i++) {
        count += text[i] == ';';
    }
    rules->rules = arena_array(arena, (size_t)count, sizeof *rules->rules);
    if (rules->rules == NULL) {
        return NO_MEMORY("ATTN_BACKEND", "the selection text");
    }
    while (more) {
        struct span rest;
        struct span rule = split(span, ';', &rest, &more);
        attn_status status = parse_rule(&rules->rules[rules->count++], rule, arena, error);
        if (status != ATTN_OK) {
            *rules = (struct rules){NULL, 0};
            return status;
        }
        span = rest;
    }
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
