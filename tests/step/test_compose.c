/* SPDX-License-Identifier: Apache-2.0 */
/* Each composition of the core gives what a backend gives that does the whole in one kernel. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/test.h"
#include "support/client.h"

#define BOUND 3e-5

enum { TOKENS = 31 };

static const int32_t mixed_queries[] = {1, 1, 9, 20}, mixed_lens[] = {40, 17, 33, 20};

static const struct {
    const char *name;
    struct attn_layer_desc layer;
} wholes[] = {
    {"plain", {.kind = ATTN_LAYER_DECODER, .causal = 1}},
    {"static sink", {.kind = ATTN_LAYER_DECODER, .causal = 1, .sink_len = 5}},
    {"static sink with a window",
     {.kind = ATTN_LAYER_DECODER, .causal = 1, .sink_len = 16, .has_window = 1, .window_left = 6}},
    {"chunks", {.kind = ATTN_LAYER_DECODER, .causal = 1, .chunk_size = 16}},
    {"chunks with a look back",
     {.kind = ATTN_LAYER_DECODER, .causal = 1, .chunk_size = 16, .chunk_lookback = 1}},
    {"cross", {.kind = ATTN_LAYER_CROSS}},
    {"encoder", {.kind = ATTN_LAYER_ENCODER}},
};

TEST(test_like_the_whole)
{
    for (size_t i = 0; i < sizeof wholes / sizeof *wholes; i++) {
        struct fixture whole, composed;
        const struct attn_layer_desc *layer = &wholes[i].layer;
        fixture_init(&whole, "cpu_ref", layer, mixed_queries, mixed_lens, 4, 0, NULL, true);
        fixture_init(&composed, "example", layer, mixed_queries, mixed_lens, 4, 0, NULL, true);
        fixture_step(&whole);
        fixture_step(&composed);
        double difference = fixture_difference(&whole, &composed);
        if (layer->kind == ATTN_LAYER_CROSS) { /* whose keys come once */
            composed.io.k = composed.io.v = NULL;
            fixture_step(&composed);
            difference = fmax(difference, fixture_difference(&whole, &composed));
        }
        fixture_finish(&whole);
        fixture_finish(&composed);
        print_message("%s: largest difference %g\n", wholes[i].name, difference);
        assert_true(difference < BOUND);
    }
}

/* Partial results of a step as large as its plan allows. */
TEST(test_as_large_as_the_limits)
{
    static const int32_t many_queries[] = {1, 100, 100, MAX_TOKENS - 201},
                         many_lens[] = {40, 100, 117, 60};
    const struct attn_layer_desc layer = {.kind = ATTN_LAYER_DECODER, .causal = 1, .sink_len = 5};
    struct fixture whole, composed;
    fixture_init(&whole, "cpu_ref", &layer, many_queries, many_lens, 4, 0, NULL, false);
    fixture_init(&composed, "example", &layer, many_queries, many_lens, 4, 0, NULL, false);
    fixture_step(&whole);
    fixture_step(&composed);
    assert_true(fixture_difference(&whole, &composed) < BOUND);
    fixture_finish(&whole);
    fixture_finish(&composed);
}

/* Padded decodes and prefills without keys among the others: zeros and -inf, no sink, no chunk. */
TEST(test_requests_without_keys)
{
    static const int32_t idle_queries[] = {1, 1, 1, 9, 2, 20, 3},
                         idle_lens[] = {40, 0, 17, 33, 0, 20, 0};
    for (int32_t i = 0; i < 2; i++) {
        const struct attn_layer_desc layer = {.kind = ATTN_LAYER_DECODER,
                                              .causal = 1,
                                              .sink_len = i == 0 ? 5 : 0,
                                              .chunk_size = i == 1 ? 16 : 0};
        struct fixture whole, composed;
        fixture_init(&whole, "cpu_ref", &layer, idle_queries, idle_lens, 7, 0, NULL, true);
        fixture_init(&composed, "example", &layer, idle_queries, idle_lens, 7, 0, NULL, true);
        fixture_step(&whole);
        fixture_step(&composed);
        assert_true(fixture_difference(&whole, &composed) < BOUND);
        for (int32_t d = 0; d < 4 * 32; d++) {
            assert_true(composed.out[1 * 4 * 32 + d] == 0 && composed.out[12 * 4 * 32 + d] == 0);
        }
        assert_true(isinf(composed.lse[1]) && composed.lse[1] < 0);
        fixture_finish(&whole);
        fixture_finish(&composed);
    }
}

/* All but the first request, whose rows stay as they are, by rows of the table in another order. */
TEST(test_rows_and_tables_of_others)
{
    static const int32_t rows[] = {2, 0, 1};
    const size_t first = 4 * 32 * sizeof(float); /* the row of request 0 */
    int32_t *table = malloc(sizeof(int32_t) * MAX_REQS * MAX_BLOCKS);
    for (size_t i = 0; i < sizeof wholes / sizeof *wholes; i++) {
        struct fixture whole, composed;
        struct attn_layer_desc layer = wholes[i].layer;
        if (layer.kind != ATTN_LAYER_DECODER) {
            continue;
        }
        layer.needs_block_table_row = 1;
        fixture_init(&whole, "cpu_ref", &layer, mixed_queries, mixed_lens, 4, 0, NULL, true);
        fixture_init(&composed, "example", &layer, mixed_queries, mixed_lens, 4, 0, NULL, true);
        fixture_step(&whole);
        fixture_step(&composed);
        for (int32_t r = 0; r < 3; r++) {
            memcpy(table + (int64_t)rows[r] * MAX_BLOCKS,
                   composed.block_table + (int64_t)(r + 1) * MAX_BLOCKS,
                   MAX_BLOCKS * sizeof *table);
        }
        composed.batch.num_reqs = 3;
        composed.batch.query_start_loc = composed.batch.query_start_loc_host =
            &composed.query_start_loc[1];
        composed.batch.seq_lens = composed.batch.seq_lens_host = &composed.seq_lens[1];
        composed.batch.block_table = table;
        composed.batch.block_table_row = rows;
        composed.batch.block_table_rows = 3;
        composed.io.flags = ATTN_RUN_NO_WRITE;
        memset(composed.out + 4 * 32, 0xff, (TOKENS - 1) * first);
        memcpy(whole.out, composed.out, first);
        fixture_step(&composed);
        assert_memory_equal(composed.out, whole.out, first);
        for (int32_t h = 0; h < 4; h++) { /* its log-sum-exp, too */
            whole.lse[h * TOKENS] = composed.lse[h * TOKENS];
        }
        if (!(fixture_difference(&whole, &composed) < BOUND)) {
            fail_msg("%s: %g", wholes[i].name, fixture_difference(&whole, &composed));
        }
        fixture_finish(&whole);
        fixture_finish(&composed);
    }
    free(table);
}

static const int32_t prefix_queries[] = {1, 2, 1, 3, 1, 1, 2, 1};
static const int32_t prefix_lens[] = {300, 290, 291, 401, 285, 283, 310, 300};

struct shared {
    const struct attn_layer_desc *layer;
    const char *backend;
    int32_t num_reqs, prefix; /* as the engine says it; the requests share 272 keys */
    int32_t causal;           /* of the batch */
    uint32_t flags;
    bool expected;
};

/* Requests over one prefix of 272 keys: with the cascade and without it. */
static void hold_cascade(const struct shared *s)
{
    struct fixture plain, cascade;
    fixture_init(&plain, s->backend, s->layer, prefix_queries, prefix_lens, s->num_reqs, 272, NULL,
                 false);
    fixture_init(&cascade, s->backend, s->layer, prefix_queries, prefix_lens, s->num_reqs, 272,
                 NULL, false);
    plain.batch.flags = ATTN_BATCH_NO_CASCADE;
    cascade.batch.flags = s->flags;
    plain.batch.causal = cascade.batch.causal = s->causal;
    cascade.batch.common_prefix_len = s->prefix;
    /* Poison over partial results shows whether the merge read them. */
    memset(cascade.workspace, 0xff, client_workspace_bytes(cascade.api, cascade.plan));
    uint8_t *copy = malloc(client_workspace_bytes(cascade.api, cascade.plan));
    memcpy(copy, cascade.workspace, client_workspace_bytes(cascade.api, cascade.plan));
    fixture_step(&plain);
    fixture_step(&cascade);
    bool taken =
        memcmp(copy, cascade.workspace, client_workspace_bytes(cascade.api, cascade.plan)) != 0;
    double difference = fixture_difference(&plain, &cascade);
    free(copy);
    fixture_finish(&plain);
    fixture_finish(&cascade);
    if (!(difference < BOUND) || taken != s->expected) {
        fail_msg("cascade %s, largest difference %g", taken ? "taken" : "not taken", difference);
    }
}

TEST(test_cascade)
{
    const struct attn_layer_desc plain = {.kind = ATTN_LAYER_DECODER, .causal = 1},
                                 sinks = {.kind = ATTN_LAYER_DECODER, .causal = 1, .has_sinks = 1},
                                 window = {.kind = ATTN_LAYER_DECODER,
                                           .causal = 1,
                                           .has_window = 1,
                                           .window_left = 400},
                                 invariant = {
                                     .kind = ATTN_LAYER_DECODER, .causal = 1, .batch_invariant = 1};
    const struct shared cases[] = {
        {&plain, "cpu_ref", 8, 272, 0, 0, true},
        {&plain, "example", 8, 272, 0, 0, true},
        {&sinks, "cpu_ref", 8, 272, 0, 0, true},
        {&window, "cpu_ref", 8, 272, 0, 0, false},
        {&invariant, "cpu_ref", 8, 272, 0, 0, false},
        {&plain, "cpu_ref", 7, 272, 0, 0, false}, /* too few requests */
        {&plain, "cpu_ref", 8, 255, 0, 0, false}, /* too few keys */
        {&plain, "cpu_ref", 8, 280, 0, 0, true},  /* not whole blocks */
        {&plain, "cpu_ref", 8, 400, 0, 0, true},  /* into the queries */
        {&plain, "cpu_ref", 8, 272, ATTN_CAUSAL_NO, 0, false},
        {&plain, "cpu_ref", 8, 272, 0, ATTN_BATCH_IN_CAPTURE, false},
        {&plain, "cpu_ref", 8, 272, 0, ATTN_BATCH_NO_CASCADE, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        hold_cascade(&cases[i]);
    }
}
