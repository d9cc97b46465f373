/* SPDX-License-Identifier: Apache-2.0 */
/* The selection text: `[where=]list[;[where=]list…]`.
 *
 * list: names by preference, separated by commas; globs (`cuda_*`), `name@variant`; `^name`
 * excludes; the word `conformant` excludes backends that attn-check has not found without a failure
 * here; a trailing `?` makes the list a wish instead of an order.
 *
 * where: layers.3, layers.0-11, a layer kind (where_kinds in grammar.c) or a phase (prefill,
 * decode); without it: everything.
 *
 * Rules read left to right and the last one that matches decides. */
#ifndef CORE_SELECT_GRAMMAR_H
#define CORE_SELECT_GRAMMAR_H

#include <attn/layer.h>
#include <stdbool.h>

#include "util/arena.h"
#include "util/error.h"

struct pattern {
    const char *text; /* without '^' */
    bool exclude;
    size_t position; /* in the selection text, for errors */
};

/* WHERE_LAYER_PHASE has no syntax: it comes from an imported assignment. */
enum where_kind { WHERE_ALL, WHERE_LAYERS, WHERE_KIND, WHERE_PHASE, WHERE_LAYER_PHASE };

struct rule {
    const char *text; /* the rule as it was written, trimmed */
    int32_t where;    /* enum where_kind */
    int32_t first;    /* WHERE_LAYERS: indices; WHERE_PHASE: the phase; WHERE_LAYER_PHASE: both */
    int32_t last;
    const char *kind; /* WHERE_KIND: its name */
    struct pattern *patterns;
    int32_t num_patterns;
    int32_t num_wanted; /* patterns that do not exclude */
    bool wish;
    bool conformant; /* the list has the word: no backend without a record is taken */
};

struct rules {
    struct rule *rules;
    int32_t count;
};

/* Parses `length` bytes. Everything lives in the arena. A syntax error names the position, counted
 * from 0, and shows it with a caret. Empty text has no rules. */
attn_status rules_parse(struct rules *rules, const char *text, size_t length, struct arena *arena,
                        struct attn_error *error);

/* The rule that decides for a layer and phase, or NULL. */
const struct rule *rules_find(const struct rules *rules, int32_t layer_index,
                              const struct attn_layer_desc *layer, int32_t phase);

/* `name` or `name@variant` against a pattern; a pattern without '@' fits every variant. */
bool pattern_fits(const char *pattern, const char *name, const char *variant);
bool pattern_is_glob(const char *pattern);

/* ATTN_ERROR_SYNTAX or another status, with the text and a caret under `position`. */
attn_status rules_error(struct attn_error *error, attn_status status, const char *text,
                        size_t length, size_t position, const char *what);

#endif
