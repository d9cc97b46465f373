/* SPDX-License-Identifier: Apache-2.0 */
/* A batch that is cut into its decodes and prefills, each part for a backend of its own, gives what
 * one backend gives of the whole: each part reads the arrays of its own requests. */
#include <string.h>

#include "fixture.h"
#include "backend_recording.h"
#include "support/client.h"
#include "support/test.h"

enum { REQS = 4, LONGEST = 20 };

static const int32_t queries[REQS] = {1, 1, 9, LONGEST}, lens[REQS] = {40, 17, 33, 20};

/* What the batch brings next to its lengths and its table: other for each request. */
static struct {
    uint32_t bits[REQS][LONGEST];
    float bias[REQS][LONGEST][LONGEST];
    uint8_t causal[REQS];
    int32_t spans[5][2], span_starts[REQS + 1];
    int32_t table[REQS][MAX_BLOCKS], rows[REQS];
} given = {.causal = {1, 0, 0, 1},
           .spans = {{0, 9}, {3, 8}, {0, 30}, {2, 6}, {9, 19}},
           .span_starts = {0, 1, 2, 3, 5},
           .rows = {2, 0, 3, 1}};

static void add_bits(struct fixture *f)
{
    for (uint32_t r = 0; r < REQS; r++) {
        for (uint32_t i = 0; i < LONGEST; i++) {
            given.bits[r][i] = 1u << i | (r + 1) * (i + 3) * 0x9e3779b9u >> 7;
        }
    }
    f->batch.tree = given.bits;
    f->batch.tree_stride_request = LONGEST;
    f->batch.tree_stride_row = 1;
}

static void add_bias(struct fixture *f)
{
    for (int32_t i = 0; i < REQS * LONGEST * LONGEST; i++) {
        given.bias[i / LONGEST / LONGEST][i / LONGEST % LONGEST][i % LONGEST] =
            (float)(i * 7 % 31 - 15) / 8;
    }
    f->batch.tree = given.bias;
    f->batch.tree_stride_request = LONGEST * LONGEST;
    f->batch.tree_stride_row = LONGEST;
}

static void add_causal(struct fixture *f)
{
    f->batch.causal_per_request = given.causal;
}

static void add_spans(struct fixture *f)
{
    f->batch.spans = given.spans[0];
    f->batch.span_start_loc = given.span_starts;
    f->batch.num_spans = 5;
}

static void add_rows(struct fixture *f)
{
    for (int32_t r = 0; r < REQS; r++) {
        memcpy(given.table[given.rows[r]], f->block_table + r * MAX_BLOCKS, sizeof given.table[0]);
    }
    f->batch.block_table = given.table[0];
    f->batch.block_table_row = given.rows;
    f->batch.block_table_rows = REQS;
}

static void add_nothing(struct fixture *f)
{
}

static const struct {
    const char *name;
    struct attn_layer_desc layer;
    void (*add)(struct fixture *f);
} cases[] = {
    {"tables", DECODER(), add_nothing},
    {"cross", {.kind = ATTN_LAYER_CROSS}, add_nothing},
    {"rows", DECODER(), add_rows},
    {"causal flags", DECODER(.causal_per_request = 1), add_causal},
    {"spans", DECODER(.prefix_lm = 1), add_spans},
    {"trees", DECODER(.tree_mask = ATTN_TREE_BITS), add_bits},
    {"biases", DECODER(.tree_mask = ATTN_TREE_BIAS), add_bias},
};

TEST(test_parts_like_the_whole)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct attn_batch_split split = {.struct_size = sizeof split};
        OWNED(fixture_finish) struct fixture whole, cut;
        fixture_init(&whole, "cpu_ref", &cases[i].layer, queries, lens, REQS, 0, NULL, true);
        fixture_init(&cut, "prefill=recording;decode=recording_apart", &cases[i].layer, queries,
                     lens, REQS, 0, NULL, true);
        cases[i].add(&whole);
        fixture_step(&whole);
        cases[i].add(&cut);
        fixture_step(&cut);
        assert_ok(cut.api->plan_split(cut.plan, &split));
        assert_int_equal(split.num_decodes, 2);
        assert_int_equal(split.num_decode_tokens, 2);
        assert_int_equal(split.num_prefills, 2);
        assert_int_equal(split.num_prefill_tokens, 9 + LONGEST);
        const double difference = fixture_difference(&whole, &cut);
        if (difference != 0) {
            fail_msg("%s: the largest difference is %g", cases[i].name, difference);
        }
    }
}

/* Static sinks of a backend without them are seen by all queries: what the batch brings for the
 * other keys is not handed to their attend. */
TEST(test_sinks_without_terms)
{
    for (size_t i = 3; i < sizeof cases / sizeof *cases; i++) {
        struct attn_layer_desc layer = cases[i].layer;
        OWNED(fixture_finish) struct fixture whole, apart;
        layer.sink_len = 3;
        fixture_init(&whole, "cpu_ref", &layer, queries, lens, REQS, 0, NULL, true);
        fixture_init(&apart, "recording_narrow", &layer, queries, lens, REQS, 0, NULL, true);
        cases[i].add(&whole);
        fixture_step(&whole);
        cases[i].add(&apart);
        recorded_by_core()->attends = recorded_by_core()->unread = 0;
        fixture_step(&apart);
        assert_true(recorded_by_core()->attends >= 2);
        assert_int_equal(recorded_by_core()->unread, 0);
        assert_true(fixture_difference(&whole, &apart) < 3e-5);
    }
}

/* A prefix that is attended once lies before all trees. */
TEST(test_prefix_before_trees)
{
    enum { MANY = 8, SHARED = 320 };
    static const int32_t two[MANY] = {2, 2, 2, 2, 2, 2, 2, 2},
                         long_lens[MANY] = {400, 333, 350, 401, 380, 352, 399, 336};
    static const uint32_t bits[2] = {1, 2}; /* none sees the other */
    const struct attn_layer_desc layer = DECODER(.tree_mask = ATTN_TREE_BITS);
    OWNED(fixture_finish) struct fixture plain, cascade;
    fixture_init(&plain, "cpu_ref", &layer, two, long_lens, MANY, SHARED, NULL, true);
    fixture_init(&cascade, "recording", &layer, two, long_lens, MANY, SHARED, NULL, true);
    plain.batch.flags = ATTN_BATCH_NO_CASCADE;
    plain.batch.tree = cascade.batch.tree = bits;
    plain.batch.tree_stride_row = cascade.batch.tree_stride_row = 1;
    fixture_step(&plain);
    recorded_by_core()->attends = 0;
    fixture_step(&cascade);
    assert_int_equal(recorded_by_core()->attends, 2);
    assert_true(fixture_difference(&plain, &cascade) < 3e-5);
}

/* Drafts of a request are its decode: one more where they are drafted in parallel. */
TEST(test_drafts_are_decodes)
{
    static const int32_t drafted[] = {1, 3, 4, 5}, lengths[] = {40, 17, 33, 20};
    struct attn_layer_desc layer = DECODER(.num_speculative_tokens = 2);
    for (int32_t parallel = 0; parallel < 2; parallel++) {
        struct attn_batch_split split = {.struct_size = sizeof split};
        OWNED(fixture_finish) struct fixture f;
        layer.parallel_drafting = parallel;
        fixture_init(&f, "cpu_ref", &layer, drafted, lengths, REQS, 0, NULL, false);
        fixture_step(&f);
        assert_ok(f.api->plan_split(f.plan, &split));
        assert_int_equal(split.num_decodes, parallel ? 4 : 2);
    }
}

/* New rows of the table in the same plan of the batch, and back. */
TEST(test_rows_are_updated)
{
    const struct attn_layer_desc layer = DECODER();
    OWNED(fixture_finish) struct fixture plain, updated;
    fixture_init(&plain, "cpu_ref", &layer, queries, lens, REQS, 0, NULL, true);
    fixture_init(&updated, "cpu_ref", &layer, queries, lens, REQS, 0, NULL, true);
    fixture_step(&plain);
    const struct attn_batch before = updated.batch;
    CHECK(&updated, fixture_batch(&updated));
    add_rows(&updated);
    for (int32_t i = 0; i < 2; i++) {
        const struct attn_batch *tables = i == 0 ? &updated.batch : &before;
        CHECK(&updated, updated.api->plan_update_block_table(updated.plan, updated.plan, tables,
                                                             NULL, &updated.error));
        CHECK(&updated, fixture_run(&updated));
        assert_true(fixture_difference(&plain, &updated) == 0);
    }
}
