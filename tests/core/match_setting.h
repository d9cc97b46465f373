/* SPDX-License-Identifier: Apache-2.0 */
/* What tests of the comparison of a layer with a backend's declaration begin with. */
#ifndef CORE_MATCH_SETTING_H
#define CORE_MATCH_SETTING_H

#include <string.h>

#include "select/layer.h"
#include "select/match.h"
#include "select_fixture.h"

/* A backend, a layer, and what matching them found. */
struct setting {
    struct fixture fixture;
    struct arena arena;
    struct attn_backend_caps *caps;
    struct attn_layer_desc layer;
    struct reasons reasons;
};

static inline void setting_init(struct setting *s)
{
    fixture_init(&s->fixture);
    arena_init(&s->arena, &s->fixture.runtime.host);
    s->caps = fixture_add(&s->fixture, "alpha", "", 1);
    s->layer = fixture_layer("l");
}

static inline void setting_finish(struct setting *s)
{
    arena_finish(&s->arena);
    fixture_finish(&s->fixture);
}

/* Resolves the layer and matches it in the decode phase. */
static inline struct match match_one(struct setting *s)
{
    struct assignment_layer *layer = arena_alloc(&s->arena, sizeof *layer);
    struct attn_error error = ATTN_ERROR_INIT;
    struct match match;
    s->reasons = (struct reasons){&s->arena, &s->fixture.runtime.host, NULL, 0, 0, false};
    if (layer_resolve(&s->arena, &s->layer, 0, NULL, &layer->layer, &error) != ATTN_OK) {
        fail_msg("%s", error.message);
    }
    match_backend(s->caps, &layer->layer, ATTN_PHASE_DECODE, NULL, 0, &match, &s->reasons);
    assert_false(s->reasons.failed);
    return match;
}

static inline void expect_reasons(struct setting *s, int32_t count)
{
    match_one(s);
    assert_int_equal(s->reasons.count, count);
}

/* So many reasons (ANY: at least one), of these fields among them. */
#define ANY (-1)
#define expect_fields(s, count, ...) expect_each(s, count, (const char *const[]){__VA_ARGS__, NULL})
static inline void expect_each(struct setting *s, int32_t count, const char *const *fields)
{
    match_one(s);
    for (; *fields != NULL; fields++) {
        int32_t i = 0;
        while (i < s->reasons.count && strcmp(s->reasons.items[i].field, *fields) != 0) {
            i++;
        }
        if (i == s->reasons.count) {
            fail_msg("no reason of %s", *fields);
        }
    }
    assert_true(count == ANY || count == s->reasons.count);
}

/* No layer that can be matched, for this field. */
static inline void expect_unresolved(struct setting *s, const char *field)
{
    struct assignment_layer *layer = arena_alloc(&s->arena, sizeof *layer);
    struct attn_error error = ATTN_ERROR_INIT;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &error, field,
               layer_resolve(&s->arena, &s->layer, 0, NULL, &layer->layer, &error));
}

/* The layer is served, by that composition. */
static inline struct match expect_composed(struct setting *s, uint64_t composed)
{
    struct match match = match_one(s);
    assert_int_equal(s->reasons.count, 0);
    assert_int_equal(match.composed, composed);
    return match;
}

#endif
