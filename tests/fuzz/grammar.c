/* SPDX-License-Identifier: Apache-2.0 */
/* ATTN_BACKEND: any bytes through the parser, and, as far as they are text, through a selection of
 * three kinds of layers over backends in several variants. What is reported is inside the text, and
 * a selection answers for every layer. */
#include <string.h>

#include "../core/select_fixture.h"
#include "fuzz.h"
#include "select/grammar.h"
#include "util/counts.h"

#define NUM_LAYERS 3

static void check_rules(const struct rules *rules, size_t length)
{
    const struct attn_layer_desc layer = fixture_layer("x");
    for (int32_t r = 0; r < rules->count; r++) {
        const struct rule *rule = &rules->rules[r];
        int32_t wanted = 0;
        FUZZ_CHECK((rule->num_patterns > 0 || rule->conformant) && strlen(rule->text) <= length);
        for (int32_t i = 0; i < rule->num_patterns; i++) {
            FUZZ_CHECK(rule->patterns[i].position < length && rule->patterns[i].text[0] != '\0');
            wanted += !rule->patterns[i].exclude;
        }
        FUZZ_CHECK(wanted == rule->num_wanted &&
                   rule->first <= rule->last + (rule->where != WHERE_LAYERS));
    }
    for (int32_t i = 0; i < NUM_LAYERS; i++) {
        const struct rule *found = rules_find(rules, i, &layer, i % NUM_PHASES);
        FUZZ_CHECK(found == NULL || (found >= rules->rules && found < rules->rules + rules->count));
    }
}

static void select_by(const char *text)
{
    struct fixture fixture;
    struct attn_layer_desc layers[NUM_LAYERS];
    struct attn_error error;
    attn_assignment *assignment = NULL;
    fixture_init(&fixture);
    fixture_add(&fixture, "cpu_fast", "avx2", 5);
    fixture_add(&fixture, "cpu_fast", "avx512", 7);
    fixture_add(&fixture, "cpu_ref", "", 0);
    fixture_add(&fixture, "cpu_window", "", 3)->terms = ATTN_TERM_CAUSAL;
    for (int32_t i = 0; i < NUM_LAYERS; i++) {
        layers[i] = fixture_layer(i == 0 ? "a" : i == 1 ? "b" : "c");
    }
    layers[1].has_window = 1;
    layers[1].window_left = 127;
    layers[2].kind = ATTN_LAYER_CROSS;
    layers[2].causal = 0;
    attn_status status = fixture_select(&fixture, text, layers, NUM_LAYERS, &assignment, &error);
    fuzz_check_error(status, &error);
    FUZZ_CHECK((status == ATTN_OK) == (assignment != NULL));
    for (int32_t i = 0; assignment != NULL && i < NUM_LAYERS * NUM_PHASES; i++) {
        struct attn_choice choice = {.struct_size = sizeof choice};
        FUZZ_CHECK(assignment_choice(assignment, i / 2, i % 2, &choice) == ATTN_OK);
        FUZZ_CHECK(choice.status == ATTN_OK && choice.backend >= 0 && choice.backend < 4);
    }
    assignment_destroy(assignment);
    fixture_finish(&fixture);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct fixture fixture;
    struct arena arena;
    struct rules rules;
    struct attn_error error = ATTN_ERROR_INIT;
    struct blocks blocks = {.count = 0};
    char *exact = blocks_add(&blocks, size), *text = blocks_add(&blocks, size + 1);
    memcpy(exact, bytes, size);
    memcpy(text, bytes, size);
    fixture_init(&fixture);
    arena_init(&arena, &fixture.runtime.host);
    attn_status status = rules_parse(&rules, exact, size, &arena, &error); /* not NUL-terminated */
    fuzz_check_error(status, &error);
    if (status == ATTN_OK) {
        check_rules(&rules, size);
    }
    arena_finish(&arena);
    fixture_finish(&fixture);
    select_by(text);
    blocks_free(&blocks);
    return 0;
}
