/* SPDX-License-Identifier: Apache-2.0 */
/* Each form of ATTN_BACKEND, and each malformed one with the position that its error shows. */
#include <stdio.h>
#include <string.h>

#include "select/grammar.h"
#include "select_fixture.h"

/* What every CASE begins with; rules lie in the arena until the next text is parsed. */
static struct fixture fixture;
static struct arena arena;
static struct rules rules;
static struct attn_error error;

static int begin(void **state)
{
    fixture_init(&fixture);
    arena_init(&arena, &fixture.runtime.host);
    return 0;
}

static int end(void **state)
{
    arena_finish(&arena);
    fixture_finish(&fixture);
    return 0;
}

#define CASE(name) TEST_AROUND(name, begin, end)

static attn_status parse_bytes(const char *text, size_t length)
{
    error = (struct attn_error)ATTN_ERROR_INIT;
    arena_finish(&arena);
    arena_init(&arena, &fixture.runtime.host);
    return rules_parse(&rules, text, length, &arena, &error);
}

static attn_status parse(const char *text)
{
    return parse_bytes(text, strlen(text));
}

struct good {
    const char *text;
    int32_t num_rules, where, first, last, num_patterns, num_wanted;
    bool wish;
    const char *pattern; /* the last one of the last rule */
};

CASE(test_forms)
{
    static const struct good forms[] = {
        {"a", 1, WHERE_ALL, 0, 0, 1, 1, false, "a"},
        {"a,b", 1, WHERE_ALL, 0, 0, 2, 2, false, "b"},
        {" a , ^b ", 1, WHERE_ALL, 0, 0, 2, 1, false, "b"},
        {"^a", 1, WHERE_ALL, 0, 0, 1, 0, false, "a"},
        {"conformant , a", 1, WHERE_ALL, 0, 0, 1, 1, false, "a"},
        {"a?", 1, WHERE_ALL, 0, 0, 1, 1, true, "a"},
        {"cuda_*", 1, WHERE_ALL, 0, 0, 1, 1, false, "cuda_*"},
        {"a@avx2", 1, WHERE_ALL, 0, 0, 1, 1, false, "a@avx2"},
        {"layers.3=a", 1, WHERE_LAYERS, 3, 3, 1, 1, false, "a"},
        {"layers.0-11 = a?", 1, WHERE_LAYERS, 0, 11, 1, 1, true, "a"},
        {"b;decode=a", 2, WHERE_PHASE, ATTN_PHASE_DECODE, 0, 1, 1, false, "a"},
        {"b;prefill=a;", 2, WHERE_PHASE, ATTN_PHASE_PREFILL, 0, 1, 1, false, "a"},
        {"b;c;mla_sparse=a", 3, WHERE_KIND, 0, 0, 1, 1, false, "a"},
        {"static_sink=a", 1, WHERE_KIND, 0, 0, 1, 1, false, "a"},
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        const struct good *form = &forms[i];
        assert_ok(parse(form->text));
        assert_int_equal(rules.count, form->num_rules);
        const struct rule *rule = &rules.rules[rules.count - 1];
        assert_int_equal(rule->where, form->where);
        assert_int_equal(rule->first, form->first);
        assert_int_equal(rule->last, form->last);
        assert_int_equal(rule->num_patterns, form->num_patterns);
        assert_int_equal(rule->num_wanted, form->num_wanted);
        assert_int_equal(rule->wish, form->wish);
        assert_string_equal(rule->patterns[rule->num_patterns - 1].text, form->pattern);
    }
}

CASE(test_empty)
{
    static const char *const texts[] = {"", "  ", "\t\n"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        assert_ok(parse(texts[i]));
        assert_int_equal(rules.count, 0);
    }
}

CASE(test_malformed)
{
    static const struct {
        const char *text;
        size_t position;
    } texts[] = {{";", 0},
                 {"a;;b", 2},
                 {"a,", 2},
                 {",a", 0},
                 {"a,,b", 2},
                 {"^", 1},
                 {"full=", 5},
                 {"=a", 0},
                 {"fool=a", 0},
                 {"layers.=a", 7},
                 {"layers.x=a", 7},
                 {"layers.3-=a", 9},
                 {"layers.5-2=a", 9},
                 {"layers.1x=a", 8},
                 {"layers.100000=a", 7},
                 {"a b", 1},
                 {"a=b=c", 0},
                 {"full=b=c", 6},
                 {"a;b$", 3},
                 {"?", 0},
                 {"a;decode=^", 10}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char expected[32];
        attn_status status = parse(texts[i].text);
        snprintf(expected, sizeof expected, "position %zu:", texts[i].position);
        if (status != ATTN_ERROR_SYNTAX ||
            strncmp(error.message, expected, strlen(expected)) != 0) {
            fail_msg("'%s' gave %d, '%s'; %s expected", texts[i].text, status, error.message,
                     expected);
        }
        /* The caret stands under the position, two columns in as the text does. */
        const char *caret = strrchr(error.message, '\n');
        assert_non_null(caret);
        assert_int_equal(strlen(caret + 1), texts[i].position + 3);
        assert_non_null(strstr(error.message, texts[i].text));
    }
}

CASE(test_not_terminated)
{
    char text[3] = {'a', '\0', 'b'};
    assert_int_equal(parse_bytes(text, sizeof text), ATTN_ERROR_SYNTAX);
    assert_ok(parse_bytes("abc", 1));
    assert_string_equal(rules.rules[0].patterns[0].text, "a");
}

CASE(test_last_match_wins)
{
    struct attn_layer_desc full = fixture_layer("full"), sliding = full;
    sliding.has_window = 1;
    sliding.window_left = 127;
    assert_ok(parse("a;sliding=b;decode=c;layers.2-3=d;decoder=e?"));
    rules.count = 4;
    assert_ptr_equal(rules_find(&rules, 0, &full, ATTN_PHASE_PREFILL), &rules.rules[0]);
    assert_ptr_equal(rules_find(&rules, 0, &sliding, ATTN_PHASE_PREFILL), &rules.rules[1]);
    assert_ptr_equal(rules_find(&rules, 0, &sliding, ATTN_PHASE_DECODE), &rules.rules[2]);
    assert_ptr_equal(rules_find(&rules, 3, &sliding, ATTN_PHASE_DECODE), &rules.rules[3]);
    assert_ptr_equal(rules_find(&rules, 4, &full, ATTN_PHASE_PREFILL), &rules.rules[0]);
    rules.count = 5;
    assert_ptr_equal(rules_find(&rules, 3, &full, ATTN_PHASE_DECODE), &rules.rules[4]);
    full.sink_len = 4; /* a kind of its own */
    assert_ptr_equal(rules_find(&rules, 3, &full, ATTN_PHASE_DECODE), &rules.rules[3]);
}

TEST(test_patterns)
{
    assert_true(pattern_fits("cpu_simd", "cpu_simd", "avx2"));
    assert_true(pattern_fits("cpu_simd@avx2", "cpu_simd", "avx2"));
    assert_false(pattern_fits("cpu_simd@avx2", "cpu_simd", "avx512"));
    assert_true(pattern_fits("cpu_*@avx*", "cpu_simd", "avx512"));
    assert_false(pattern_fits("cpu", "cpu_simd", ""));
}
