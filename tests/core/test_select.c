/* SPDX-License-Identifier: Apache-2.0 */
/* Which backend is taken, by which rule, and what is said where none can be. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "select_fixture.h"
#include "support/client.h"

/* What every CASE begins with. */
static struct fixture f;
static struct attn_error error;
static attn_assignment *a; /* the last selection's, or NULL */

static int begin(void **state)
{
    error = (struct attn_error)ATTN_ERROR_INIT;
    fixture_init(&f);
    return 0;
}

static int end(void **state)
{
    assignment_destroy(a);
    a = NULL;
    fixture_finish(&f);
    return 0;
}

#define CASE(name) TEST_AROUND(name, begin, end)

#define P ATTN_PHASE_PREFILL
#define D ATTN_PHASE_DECODE

static void chosen(int32_t layer, int32_t phase, const char *name)
{
    assert_string_equal(fixture_chosen(a, layer, phase), name);
}

static attn_status select_by(const struct attn_select_options *options,
                             const struct attn_layer_desc *layers, int32_t count)
{
    assignment_destroy(a);
    return fixture_select_by(&f, options, layers, count, &a, &error);
}

static attn_status select_as(const char *text, const struct attn_layer_desc *layers, int32_t count)
{
    const struct attn_select_options options = SIZED(attn_select_options, .backend = text);
    return select_by(&options, layers, count);
}

/* The names that layer 0 gets, each NULL: any. */
static void chooses(const char *text, const struct attn_layer_desc *layers, int32_t count,
                    const char *prefill, const char *decode)
{
    if (select_as(text, layers, count) != ATTN_OK) {
        fail_msg("'%s': %s", text, error.message);
    }
    assert_string_equal(fixture_chosen(a, 0, P), prefill ? prefill : fixture_chosen(a, 0, P));
    assert_string_equal(fixture_chosen(a, 0, D), decode ? decode : fixture_chosen(a, 0, D));
}

/* The selection fails, and its error has the text. */
static void refuses(attn_status status, const char *text, const struct attn_layer_desc *layers,
                    int32_t count, const char *says)
{
    assert_int_equal(select_as(text, layers, count), status);
    assert_null(a);
    if (strstr(error.message, says) == NULL) {
        fail_msg("no '%s' in: %s", says, error.message);
    }
}

CASE(test_rank_and_ties)
{
    struct attn_layer_desc layer = fixture_layer("l");
    struct attn_choice choice = {.struct_size = sizeof choice};
    int32_t verdict = -1, reasons = -1;
    fixture_add(&f, "alpha", "", 5);
    fixture_add(&f, "beta", "", 10);
    fixture_add(&f, "gamma", "", 10);
    chooses("", &layer, 1, NULL, NULL);
    assert_ok(assignment_choice(a, 0, D, &choice));
    assert_string_equal(choice.name, "beta");
    assert_string_equal(choice.rule, "");
    assert_int_equal(choice.forced, 0);
    assert_int_equal(choice.rank, 10);
    assert_int_equal(choice.kv_dtype, ATTN_KV_BF16);
    assert_int_equal(choice.block_size, 16);
    assert_true(choice.bound_of_row_rms == 2e-2 && choice.bound_of_element == 1.2e-2); /* bf16's */
    assert_true(choice.bound_of_lse == 0x1p-7);
    assert_ok(assignment_verdict(a, 0, D, 1, &verdict, &reasons));
    assert_int_equal(verdict, ATTN_VERDICT_CHOSEN);
    assert_ok(assignment_verdict(a, 0, D, 2, &verdict, &reasons));
    assert_int_equal(verdict, ATTN_VERDICT_ELIGIBLE);
    assert_int_equal(reasons, 0);
    assert_int_equal(assignment_verdict(a, 0, D, 3, &verdict, &reasons), ATTN_ERROR_NOT_FOUND);
    assert_int_equal(assignment_choice(a, 1, D, &choice), ATTN_ERROR_NOT_FOUND);
    assert_int_equal(assignment_choice(a, 0, 2, &choice), ATTN_ERROR_INVALID_ARGUMENT);
    assignment_destroy(NULL);
}

CASE(test_phases)
{
    struct attn_layer_desc layer = fixture_layer("l");
    struct attn_backend_caps *prefill = fixture_add(&f, "fast_prefill", "", 10);
    fixture_add(&f, "slow", "", 1);
    prefill->phases = 1u << P;
    chooses("", &layer, 1, "fast_prefill", "slow");
    /* No layout in common: both phases go where one cache serves both. */
    prefill->layouts = 1u << ATTN_KV_LAYOUT_PACKED_K;
    chooses("", &layer, 1, "slow", "slow");
}

CASE(test_orders_wishes_exclusions)
{
    static const struct {
        const char *text, *prefill, *decode;
        int32_t forced;
    } cases[] = {
        {"alpha", "alpha", "alpha", 1},
        {"beta,alpha", "alpha", "alpha", 1}, /* beta cannot head 72 */
        {"beta?", "gamma", "gamma", 0},
        {"^gamma", "alpha", "alpha", 0},
        {"g*", "gamma", "gamma", 1},
        {"gamma;decode=alpha", "gamma", "alpha", 1},
        {"alpha;layers.0=gamma", "gamma", "gamma", 1},
        {"alpha;layers.1-5=gamma", "alpha", "alpha", 1},
        {"alpha;full=gamma", "gamma", "gamma", 1},
        {"alpha;sliding=gamma", "alpha", "alpha", 1},
        {"alpha?", "alpha", "alpha", 1},
    };
    static const struct attn_head_size_range only_64 = {{64, 64, 1}, {0, 0, 1}, 1};
    struct attn_layer_desc layer = fixture_layer("l");
    fixture_add(&f, "alpha", "", 1);
    struct attn_backend_caps *beta = fixture_add(&f, "beta", "", 50);
    fixture_add(&f, "gamma", "", 10);
    beta->head_sizes = &only_64;
    beta->num_head_sizes = 1;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct attn_choice choice = {.struct_size = sizeof choice};
        chooses(cases[i].text, &layer, 1, cases[i].prefill, cases[i].decode);
        assert_ok(assignment_choice(a, 0, D, &choice));
        assert_int_equal(choice.forced, cases[i].forced);
    }
}

CASE(test_refused_order)
{
    struct attn_layer_desc layer = fixture_layer("model.layers.7");
    struct attn_select_options options =
        SIZED(attn_select_options, .backend = "alpha", .flags = ATTN_SELECT_KEEP_UNSERVED);
    struct attn_reason reason = {.struct_size = sizeof reason};
    int32_t verdict = -1, count = -1;
    layer.head_size = 72;
    layer.soft_cap = 30;
    fixture_add(&f, "alpha", "", 1);
    refuses(ATTN_ERROR_REFUSED, "alpha", &layer, 1, "model.layers.7");
    assert_non_null(strstr(error.message, "prefill"));
    assert_non_null(strstr(error.message, "alpha"));
    assert_non_null(strstr(error.message, "head_size 72"));
    assert_non_null(strstr(error.message, "soft_cap 30"));
    assert_non_null(strstr(error.message, "64, 128..256 in steps of 8"));
    refuses(ATTN_ERROR_NO_BACKEND, "", &layer, 1, "");
    assert_ok(select_by(&options, &layer, 1));
    assert_ok(assignment_verdict(a, 0, D, 0, &verdict, &count));
    assert_int_equal(verdict, ATTN_VERDICT_UNSUPPORTED);
    assert_int_equal(count, 2);
    assert_ok(assignment_reason(a, 0, D, 0, 0, &reason));
    assert_string_equal(reason.field, "head_size");
    assert_string_equal(reason.asked, "72");
    assert_int_equal(assignment_reason(a, 0, D, 0, 2, &reason), ATTN_ERROR_NOT_FOUND);
    size_t needed = 0;
    assert_int_equal(assignment_export(a, NULL, 0, &needed, &error), ATTN_ERROR_NO_BACKEND);
}

/* A step that may allocate is a hint, which an engine may refuse. */
CASE(test_step_allocation)
{
    struct attn_layer_desc layer = fixture_layer("layer");
    const struct attn_select_options options =
        SIZED(attn_select_options, .backend = "", .flags = ATTN_SELECT_NO_STEP_ALLOCATION);
    fixture_add(&f, "alpha", "", 2)->features |= ATTN_FEATURE_STEP_ALLOCATES;
    chooses("", &layer, 1, NULL, "alpha");
    assert_int_equal(select_by(&options, &layer, 1), ATTN_ERROR_NO_BACKEND);
    assert_non_null(strstr(error.message, "step_allocation"));
    fixture_add(&f, "beta", "", 1);
    assert_ok(select_by(&options, &layer, 1));
    chosen(0, D, "beta");
}

CASE(test_names)
{
    struct attn_layer_desc layer = fixture_layer("l");
    fixture_add(&f, "cpu_ref", "", 0);
    fixture_add(&f, "cpu_simd", "avx2", 5);
    fixture_add(&f, "cpu_simd", "avx512", 9);
    assert_int_not_equal(select_as("cpu_smid", &layer, 1), ATTN_OK);
    assert_non_null(strstr(error.message, "cpu_smid"));
    assert_non_null(strstr(error.message, "did you mean 'cpu_simd"));
    assert_non_null(strstr(error.message, "position 0"));
    assert_int_not_equal(select_as("decode=nothing_*", &layer, 1), ATTN_OK);
    chooses("^cuda_flash", &layer, 1, NULL, "cpu_simd@avx512");
    assert_non_null(strstr(f.log, "cuda_flash"));
    f.log[0] = '\0';
    chooses("cpu_simd@avx2", &layer, 1, NULL, "cpu_simd@avx2");
    assert_non_null(strstr(f.log, "forced by 'cpu_simd@avx2'"));
    f.log[0] = '\0';
    chooses("cuda_flash?", &layer, 1, NULL, NULL);
    assert_non_null(strstr(f.log, "cpu_simd@avx512 of "));
    assert_non_null(strstr(f.log, ", rank 9; nothing meets the wish 'cuda_flash?'"));
}

static int32_t asked_supports;

static attn_status refuse_decode(const struct attn_supports_args *args,
                                 const struct attn_reason_sink *reasons, struct attn_error *error)
{
    const struct attn_layer_desc *layer = args->layer;
    assert_int_equal(args->struct_size, sizeof *args);
    asked_supports++;
    assert_int_not_equal(layer->kv_dtype, ATTN_KV_AUTO);
    assert_true(layer->block_size > 0);
    assert_true(layer->head_size_v > 0);
    if (args->phase == D && strcmp(args->caps->name, "alpha") == 0) {
        reasons->refuse(reasons->user, "moon", "full", "new");
        reasons->refuse(reasons->user, "tide", "high", "low");
    }
    return ATTN_OK;
}

CASE(test_supports_is_asked_last)
{
    struct attn_layer_desc layer = fixture_layer("l");
    struct attn_reason reason = {.struct_size = sizeof reason};
    layer.block_size = 0;
    f.table.supports = refuse_decode;
    fixture_add(&f, "alpha", "", 9);
    fixture_add(&f, "beta", "", 1)->dtypes = 1u << ATTN_DTYPE_BF16;
    fixture_add(&f, "gamma", "", 0)->dtypes = 1u << ATTN_DTYPE_F16;
    asked_supports = 0;
    chooses("", &layer, 1, NULL, NULL);
    assert_int_equal(asked_supports, 4); /* gamma failed on its data */
    chosen(0, P, "alpha");
    chosen(0, D, "beta");
    assert_ok(assignment_reason(a, 0, D, 0, 1, &reason));
    assert_string_equal(reason.field, "tide");
    assert_string_equal(reason.supported, "low");
}

CASE(test_hybrid_and_sharing)
{
    struct attn_layer_desc layers[4];
    for (int32_t i = 0; i < 4; i++) {
        static const char *const names[] = {"0", "1", "2", "3"};
        layers[i] = fixture_layer(names[i]);
    }
    layers[1].has_window = 1;
    layers[1].window_left = 511;
    layers[2].kind = ATTN_LAYER_ENCODER;
    layers[2].causal = layers[2].block_size = 0;
    layers[3].kv_sharing_target = "0";
    fixture_add(&f, "alpha", "", 9)->terms &= ~(uint64_t)ATTN_TERM_SLIDING_WINDOW;
    fixture_add(&f, "beta", "", 1);
    chooses("", layers, 4, NULL, "alpha");
    chosen(1, D, "beta");
    chosen(2, D, "alpha");
    chosen(2, P, "alpha");
    assert_int_equal(a->layers[2].phases[P].choice.composed, ATTN_COMPOSE_ENCODER);
    assert_int_equal(a->layers[2].phases[P].choice.block_size, 0);
    assert_int_equal(a->layers[3].layer.sharing_target, 0);
    assert_int_equal(a->layers[3].phases[D].choice.layout, a->layers[0].phases[D].choice.layout);
}

/* A layer that reads another's cache needs no write_kv of its own. */
CASE(test_reader_writes_nothing)
{
    struct attn_layer_desc layers[] = {fixture_layer("owner"), fixture_layer("reader")};
    layers[0].has_sinks = 1; /* which beta has not */
    layers[1].kv_sharing_target = "owner";
    fixture_add(&f, "alpha", "", 1)->terms |= ATTN_TERM_SINKS;
    fixture_add(&f, "beta", "", 9)->kernels &= ~(uint64_t)ATTN_KERNEL_WRITE_KV;
    chooses("", layers, 2, NULL, "alpha");
    chosen(1, D, "beta");
}

/* Where the best of each phase have no layout in common: decode's order comes first. */
CASE(test_best_pair)
{
    struct attn_layer_desc layer = fixture_layer("l");
    /* prefill best of all, but of hnd alone; two of nhd, and one of hnd that decodes worst */
    struct attn_backend_caps *caps = fixture_add(&f, "alpha", "", 9);
    caps->layouts = 1u << ATTN_KV_LAYOUT_HND;
    caps->rank[D] = 1;
    caps = fixture_add(&f, "beta", "", 5);
    caps->layouts = 1u << ATTN_KV_LAYOUT_NHD;
    caps->rank[D] = 9;
    caps = fixture_add(&f, "gamma", "", 7);
    caps->layouts = 1u << ATTN_KV_LAYOUT_NHD;
    caps->rank[D] = 3;
    chooses("", &layer, 1, "gamma", "beta");
    assert_int_equal(a->layers[0].phases[D].choice.layout, ATTN_KV_LAYOUT_NHD);
}

/* Kernels take the preferred part of an engine's blocks, else the largest that they can. */
CASE(test_parts_of_blocks)
{
    static const struct attn_range blocks[] = {{16, 64, 16}};
    struct attn_layer_desc layer = fixture_layer("l");
    struct attn_backend_caps *caps = fixture_add(&f, "alpha", "", 9);
    caps->block_sizes = blocks;
    caps->kernels |= ATTN_KERNEL_MAKE_BLOCK_TABLE;
    layer.block_size = 192;
    for (int32_t preferred = 16; preferred <= 112; preferred += 32) {
        caps->preferred_block_size = preferred;
        chooses("", &layer, 1, NULL, NULL);
        assert_int_equal(a->layers[0].phases[D].choice.kernel_block_size,
                         preferred <= 48 ? preferred : 64);
        assert_int_equal(a->layers[0].phases[P].choice.block_size, 192);
        assert_int_equal(a->layers[0].layer.blocks_per_entry,
                         192 / a->layers[0].phases[D].choice.kernel_block_size);
    }
    /* a size that needs no cut is preferred among those that an engine offers */
    static const int32_t offered[] = {192, 32};
    const struct attn_select_options options =
        SIZED(attn_select_options, .block_sizes = offered, .num_block_sizes = 2);
    layer.block_size = 0;
    assert_ok(select_by(&options, &layer, 1));
    assert_int_equal(a->layers[0].phases[D].choice.block_size, 32);
}

/* Layers that look alike, but for a rule or an extension of their own. */
CASE(test_alike_is_not_the_same)
{
    static const struct attn_ext vendors = {ATTN_EXT_VENDOR, 0, sizeof vendors, NULL};
    static const uint32_t declared[] = {ATTN_EXT_VENDOR};
    struct attn_layer_desc layers[] = {fixture_layer("0"), fixture_layer("1"), fixture_layer("2")};
    layers[2].next = &vendors;
    fixture_add(&f, "alpha", "", 9);
    fixture_add(&f, "beta", "", 1);
    struct attn_backend_caps *caps = fixture_add(&f, "gamma", "", 2);
    caps->extensions = declared;
    caps->num_extensions = 1;
    chooses("layers.1=beta", layers, 3, NULL, "alpha");
    chosen(1, D, "beta");
    chosen(2, D, "gamma");
}

/* Decode's layout stands first; a reader takes what its target's cache has. */
CASE(test_layouts)
{
    static const struct attn_range large[] = {{64, 64, 1}};
    struct attn_layer_desc layers[] = {fixture_layer("owner"), fixture_layer("reader")};
    layers[0].has_sinks = 1; /* which gamma has not */
    layers[1].kv_sharing_target = "owner";
    fixture_add(&f, "alpha", "", 9)->terms |= ATTN_TERM_SINKS;
    struct attn_backend_caps *caps = fixture_add(&f, "beta", "", 1);
    caps->terms |= ATTN_TERM_SINKS;
    caps->preferred_layout = ATTN_KV_LAYOUT_HND;
    caps = fixture_add(&f, "gamma", "", 50);
    chooses("prefill=alpha?;decode=beta?", layers, 1, NULL, NULL);
    assert_int_equal(a->layers[0].phases[P].choice.layout, ATTN_KV_LAYOUT_HND);
    for (int32_t i = 0; i < 3; i++) {
        caps->layouts = i == 1 ? 1u << ATTN_KV_LAYOUT_HND : 3;
        caps->block_sizes = i == 2 ? large : f.backends[0].caps.block_sizes;
        caps->preferred_layout = ATTN_KV_LAYOUT_HND;
        chooses("", layers, 2, NULL, NULL);
        chosen(1, D, i == 0 ? "gamma" : "alpha");
        assert_int_equal(a->layers[1].phases[D].choice.layout, ATTN_KV_LAYOUT_NHD);
    }
}

TEST(test_two_runtimes)
{
    struct attn_layer_desc layer = fixture_layer("l");
    const struct attn_layer_desc *pointer = &layer;
    static char first[] = "alpha", second[] = "beta";
    struct fixture f[2];
    attn_assignment *a[2] = {NULL, NULL};
    for (int32_t i = 0; i < 2; i++) {
        fixture_init(&f[i]);
        fixture_add(&f[i], "alpha", "", 1);
        fixture_add(&f[i], "beta", "", 1);
        f[i].runtime.settings.backend = i == 0 ? first : second;
    }
    for (int32_t i = 0; i < 2; i++) {
        assert_ok(select_layers(&f[i].runtime, NULL, &pointer, 1, &a[i], NULL));
    }
    assert_string_equal(fixture_chosen(a[0], 0, D), "alpha");
    assert_string_equal(fixture_chosen(a[1], 0, D), "beta");
    for (int32_t i = 0; i < 2; i++) {
        assignment_destroy(a[i]);
        fixture_finish(&f[i]);
    }
}

static attn_status import(const char *text, const struct attn_layer_desc *layers, int32_t count,
                          attn_assignment **made)
{
    const struct attn_select_options options = SIZED(attn_select_options, .import_text = text);
    return fixture_select_by(&f, &options, layers, count, made, &error);
}

CASE(test_export_import)
{
    struct attn_layer_desc layers[2] = {fixture_layer("model layer=0"), fixture_layer("name=1")};
    attn_assignment *b = NULL;
    char text[1024], again[1024], small[8];
    size_t needed = 0;
    layers[1].kind = ATTN_LAYER_ENCODER;
    layers[1].encoder = ATTN_ENCODER_ONLY;
    layers[1].causal = layers[1].block_size = 0;
    fixture_add(&f, "alpha", "", 9);
    fixture_add(&f, "beta", "x", 1);
    chooses("beta;decode=alpha;encoder_only=beta", layers, 2, NULL, NULL);
    assert_ok(assignment_export(a, NULL, 0, &needed, &error));
    memset(small, 'x', sizeof small);
    assert_ok(assignment_export(a, small, sizeof small, &needed, &error));
    assert_int_equal(small[sizeof small - 1], '\0');
    assert_int_equal(strlen(small), sizeof small - 1);
    assert_ok(assignment_export(a, text, sizeof text, &needed, &error));
    assert_int_equal(strlen(text) + 1, needed);
    if (import(text, layers, 2, &b) != ATTN_OK) {
        fail_msg("%s\n%s", error.message, text);
    }
    assert_string_equal(fixture_chosen(b, 0, P), "beta@x");
    assert_string_equal(fixture_chosen(b, 0, D), "alpha");
    assert_ok(assignment_export(b, again, sizeof again, &needed, &error));
    assert_string_equal(text, again);
    assignment_destroy(b);

    /* Taken as it is, or refused. */
    assert_int_equal(import(text, layers, 1, &b), ATTN_ERROR_REFUSED);
    layers[0].name = "other";
    REFUSED_AS(ATTN_ERROR_REFUSED, &error, "import_text", import(text, layers, 2, &b));
    assert_non_null(
        strstr(error.message, "layer 0: name=model layer=0 in the text, name=other in"));
    layers[0].name = "model layer=0";
    layers[0].block_size = 32;
    assert_int_equal(import(text, layers, 2, &b), ATTN_ERROR_REFUSED);
    assert_non_null(strstr(error.message, "block_size=32 in this choice"));
    layers[0].block_size = 16;
    f.backends[0].caps.terms = 0;
    assert_int_equal(import(text, layers, 2, &b), ATTN_ERROR_REFUSED);
    assert_non_null(strstr(error.message, "causal"));
    assert_null(b);
}

/* A cache is K's dtype and V's: an assignment for other values is another one. */
CASE(test_export_of_two_dtypes)
{
    struct attn_layer_desc layers[2] = {fixture_layer("one"), fixture_layer("two")};
    OWNED(assignment_end) attn_assignment *b = NULL;
    struct attn_choice choice = {.struct_size = sizeof choice};
    char text[1024];
    size_t needed;
    layers[1].kv_dtype_v = ATTN_KV_F16;
    fixture_add(&f, "alpha", "", 9)->features |= ATTN_FEATURE_KV_DTYPE_V;
    chooses("", layers, 2, NULL, NULL);
    assert_ok(assignment_choice(a, 1, D, &choice));
    assert_int_equal(choice.kv_dtype, ATTN_KV_BF16);
    assert_int_equal(choice.kv_dtype_v, ATTN_KV_F16);
    assert_ok(assignment_export(a, text, sizeof text, &needed, &error));
    assert_non_null(strstr(text, "kv_dtype=bf16 block_size=16 layout=nhd name=one\n"));
    assert_non_null(strstr(text, "kv_dtype=bf16/f16 block_size=16 layout=nhd name=two\n"));
    assert_ok(import(text, layers, 2, &b));
    assignment_destroy(b);
    layers[1].kv_dtype_v = 0;
    assert_int_equal(import(text, layers, 2, &b), ATTN_ERROR_REFUSED);
    assert_non_null(strstr(error.message, "kv_dtype=bf16/f16 in the text, kv_dtype=bf16 in"));
}

CASE(test_malformed_import)
{
#define RIGHT "0 prefill=alpha decode=alpha"
#define LINE(layer, dtype, size, layout)                                                           \
    "attn-assignment 1\nlayer " layer " kv_dtype=" dtype " block_size=" size " layout=" layout     \
    " name=l\n"
    static const char *const texts[] = {
        "",
        "attn-assignment 2\n",
        "attn-assignment 1\n",
        "attn-assignment 1\nlayer 0\n",
        LINE("1 prefill=alpha decode=alpha", "bf16", "16", "nhd"),
        LINE(RIGHT, "bf17", "16", "nhd"),
        LINE(RIGHT, "bf16/", "16", "nhd"),
        LINE(RIGHT, "0xffff", "16", "nhd"),
        LINE(RIGHT, "bf16", "-1", "nhd"),
        LINE(RIGHT, "bf16", "16", "xyz"),
        LINE("0 prefill= decode=alpha", "bf16", "16", "nhd"),
        LINE("0 prefill=* decode=*", "bf16", "16", "nhd"),
        LINE("0 decode=alpha prefill=alpha", "bf16", "16", "nhd"),
        LINE("0 prefill=zeta decode=alpha", "bf16", "16", "nhd"),
    };
    struct attn_layer_desc layer = fixture_layer("l");
    fixture_add(&f, "alpha", "", 9);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        attn_status status = import(texts[i], &layer, 1, &a);
        if (status != ATTN_ERROR_SYNTAX && status != ATTN_ERROR_REFUSED) {
            fail_msg("'%s' gave %d", texts[i], status);
        }
        assert_true(error.message[0] != '\0');
        assert_null(a);
    }
}

/* A measurement on file decides over the plugin's estimate, for its device, shape and phase only.
 */
CASE(test_measured)
{
    static const char own[] = "32/8x128x128.bf16.bf16", other[] = "32/8x64x64.bf16.bf16";
    static const struct fixture_time times[] = {
        {own, "decode", "1x512", "alpha", 45000}, {own, "decode", "1x512", "alpha", 4500},
        {own, "decode", "8x512", "alpha", 9000},  {own, "decode", "1x512", "beta", 9000},
        {own, "decode", "8x512", "beta", 5000},   {own, "decode", "1x512", "gamma", 10},
        {own, "decode", "1x512", "gamma", 10},    {own, "decode", "1x512", "gamma", 10},
        {other, "decode", "1x512", "beta", 4000}, {other, "prefill", "1x512", "alpha", 1000}};
    char folder[] = "/tmp/attn-ranks-XXXXXX", path[64];
    struct attn_layer_desc layer = fixture_layer("l");
    struct attn_choice choice = {.struct_size = sizeof choice};
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/ranks", folder);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fixture_add(&f, "alpha", "", 1);
    fixture_add(&f, "beta", "", 50);
    fixture_add(&f, "gamma", "", 40);
    fputs("broken line\n", file);
    for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
        fixture_write_time(&f, file, &times[i]);
    }
    f.devices[0].name = "another cpu";
    fixture_write_time(&f, file, &(const struct fixture_time){own, "prefill", "1x8", "alpha", 1});
    f.devices[0].name = "cpu";
    fclose(file);
    f.runtime.settings.cache_dir = folder;
    /* The later of two lines counts; beta's product of times is larger; gamma lacks a bucket. */
    chooses("", &layer, 1, "beta", "alpha");
    assert_ok(assignment_choice(a, 0, D, &choice));
    assert_int_equal(choice.measured, 1);
    assert_ok(assignment_choice(a, 0, P, &choice));
    assert_int_equal(choice.measured, 0);
    layer.head_size = 64;
    chooses("", &layer, 1, NULL, NULL);
    assert_ok(assignment_choice(a, 0, D, &choice));
    assert_int_equal(choice.measured, 1);
    layer.head_size = 128;
    /* A window is another shape. */
    layer.has_window = 1;
    layer.window_left = 99;
    layer.window_right = 0;
    chooses("", &layer, 1, NULL, "beta");
    layer.has_window = 0;
    layer.window_left = layer.window_right = -1;
    /* An order stands over a measurement. */
    chooses("beta", &layer, 1, NULL, "beta");
    remove(path);
    remove(folder);
}

/* The fastest of one phase that shares no layout with the other's is not taken, and says why. */
CASE(test_best_of_a_phase_alone)
{
    struct attn_layer_desc layer = fixture_layer("l");
    struct attn_reason reason = {.struct_size = sizeof reason};
    int32_t verdict, count;
    fixture_add(&f, "alpha", "", 1);
    struct attn_backend_caps *beta = fixture_add(&f, "beta", "", 50);
    struct attn_backend_caps *gamma = fixture_add(&f, "gamma", "", 40);
    beta->rank[D] = 0;
    gamma->rank[P] = 0;
    chooses("", &layer, 1, "beta", "gamma"); /* on one cache */
    beta->layouts = 1u << ATTN_KV_LAYOUT_HND;
    gamma->layouts = 1u << ATTN_KV_LAYOUT_NHD;
    chooses("", &layer, 1, "alpha", "gamma");
    assert_ok(assignment_verdict(a, 0, P, 1, &verdict, &count));
    assert_int_equal(verdict, ATTN_VERDICT_ELIGIBLE);
    assert_int_equal(count, 1);
    assert_ok(assignment_reason(a, 0, P, 1, 0, &reason));
    assert_string_equal(reason.field, "cache");
    assert_string_equal(reason.asked, "one with gamma for decode");
}

/* A reader's backend takes the blocks into which its target's cache is cut. */
CASE(test_blocks_of_a_shared_cache)
{
    static const struct attn_range small[] = {{16, 16, 1}}, large[] = {{64, 64, 1}};
    static const char apart[] = "layers.0=alpha;layers.1=beta";
    struct attn_layer_desc layers[] = {fixture_layer("a"), fixture_layer("b")};
    fixture_add(&f, "alpha", "", 1)->block_sizes = small;
    fixture_add(&f, "beta", "", 1)->block_sizes = large;
    layers[0].block_size = layers[1].block_size = 64;
    chooses(apart, layers, 2, NULL, NULL);
    layers[1].kv_sharing_target = "a";
    refuses(ATTN_ERROR_REFUSED, apart, layers, 2, "blocks of 16");
    chooses("alpha", layers, 2, NULL, NULL);
}

CASE(test_devices)
{
    struct attn_layer_desc layer = fixture_layer("l");
    struct attn_select_options options = SIZED(attn_select_options, .device = {ATTN_DEVICE_CPU, 0});
    int32_t verdict = -1;
    fixture_add(&f, "cpu", "", 1);
    fixture_add(&f, "gpu", "", 1)->device = (struct attn_device){ATTN_DEVICE_CUDA, 0};
    f.devices[1] = f.devices[0];
    f.devices[1].device = (struct attn_device){ATTN_DEVICE_CUDA, 0};
    f.runtime.num_devices = 2;
    /* An engine that states no device has the CPU's memory. */
    assert_ok(select_by(NULL, &layer, 1));
    chosen(0, D, "cpu");
    options.device = (struct attn_device){ATTN_DEVICE_CUDA, 0};
    assert_ok(select_by(&options, &layer, 1));
    chosen(0, D, "gpu");
    options.device = (struct attn_device){ATTN_DEVICE_CPU, 0};
    assert_ok(select_by(&options, &layer, 1));
    chosen(0, D, "cpu");
    assert_ok(assignment_verdict(a, 0, D, 1, &verdict, NULL));
    assert_int_equal(verdict, ATTN_VERDICT_OTHER_DEVICE);
    /* An order of another device's backend is refused, and says what was not stated. */
    refuses(ATTN_ERROR_REFUSED, "gpu", &layer, 1,
            "gpu: device cpu:0, as none was stated (supported: "
            "cuda:0)");
    options.device = (struct attn_device){ATTN_DEVICE_CUDA, 7};
    assert_int_equal(select_by(&options, &layer, 1), ATTN_ERROR_NOT_FOUND);
    assert_string_equal(error.message, "there is no cuda:7 here; there is cpu:0, cuda:0");
    assert_null(a);
    struct attn_device best;
    assert_ok(best_device(&f.runtime, NULL, &best, &error));
    assert_true(best.type == ATTN_DEVICE_CUDA && best.id == 0);
    assert_ok(best_device(&f.runtime, "cpu", &best, &error));
    assert_int_equal(best.type, ATTN_DEVICE_CPU);
}
