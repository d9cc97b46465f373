/* SPDX-License-Identifier: Apache-2.0 */
/* When a common prefix is attended apart, and that its outputs are those of the whole. That each
 * composition of the core gives what a backend gives that does it in one kernel, attn-check holds.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/test.h"
#include "support/client.h"

#define BOUND 3e-5

/* Padded decodes and prefills without keys among the others: zeros and -inf, no sink, no chunk. */
TEST(test_requests_without_keys)
{
    static const int32_t idle_queries[] = {1, 1, 1, 9, 2, 20, 3},
                         idle_lens[] = {40, 0, 17, 33, 0, 20, 0};
    for (int32_t i = 0; i < 2; i++) {
        const struct attn_layer_desc layer =
            DECODER(.sink_len = i == 0 ? 5 : 0, .chunk_size = i == 1 ? 16 : 0);
        OWNED(fixture_finish) struct fixture whole, composed;
        fixture_init(&whole, "cpu_ref", &layer, idle_queries, idle_lens, 7, 0, NULL, true);
        fixture_init(&composed, "example", &layer, idle_queries, idle_lens, 7, 0, NULL, true);
        fixture_step(&whole);
        fixture_step(&composed);
        assert_true(fixture_difference(&whole, &composed) < BOUND);
        for (int32_t d = 0; d < 4 * 32; d++) {
            assert_true(composed.out[1 * 4 * 32 + d] == 0 && composed.out[12 * 4 * 32 + d] == 0);
        }
        assert_true(isinf(composed.lse[1]) && composed.lse[1] < 0);
    }
}

/* All but the first request, whose row and log-sum-exp stay as they are. */
TEST(test_rows_of_others)
{
    const struct attn_layer_desc layer = DECODER(.sink_len = 5);
    OWNED(fixture_finish) struct fixture whole, composed;
    fixture_mixed(&whole, "cpu_ref", &layer, true);
    fixture_mixed(&composed, "example", &layer, true);
    fixture_step(&whole);
    fixture_step(&composed);
    composed.batch.num_reqs = 3;
    composed.batch.query_start_loc = composed.batch.query_start_loc_host =
        &composed.query_start_loc[1];
    composed.batch.seq_lens = composed.batch.seq_lens_host = &composed.seq_lens[1];
    composed.batch.block_table += MAX_BLOCKS;
    composed.io.flags = ATTN_RUN_NO_WRITE;
    memset(composed.out, 0xff, sizeof(float) * 31 * 4 * 32);
    memcpy(composed.out, whole.out, sizeof(float) * 4 * 32);
    fixture_step(&composed);
    assert_true(fixture_difference(&whole, &composed) < BOUND);
}

/* Keys of a cross layer come once. */
TEST(test_cross_without_keys)
{
    const struct attn_layer_desc layer = {.kind = ATTN_LAYER_CROSS};
    OWNED(fixture_finish) struct fixture whole, again;
    fixture_mixed(&whole, "cpu_ref", &layer, true);
    fixture_mixed(&again, "example", &layer, true);
    fixture_step(&whole);
    fixture_step(&again);
    again.io.k = again.io.v = NULL;
    fixture_step(&again);
    assert_true(fixture_difference(&whole, &again) < BOUND);
}

static const int32_t prefix_queries[] = {1, 2, 1, 3, 1, 1, 2, 1};
static const int32_t prefix_lens[] = {300, 290, 291, 401, 285, 283, 310, 300};

struct shared {
    const struct attn_layer_desc *layer;
    const char *backend;
    int32_t num_reqs, prefix; /* as the engine says it; the requests share 272 keys */
    int32_t causal;           /* the batch's */
    uint32_t flags;
    bool expected;
};

/* Requests over one prefix of 272 keys: with the cascade and without it. */
static void check_cascade(const struct shared *s)
{
    OWNED(fixture_finish) struct fixture plain, cascade;
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
    OWNED(memory_end) uint8_t *copy = malloc(client_workspace_bytes(cascade.api, cascade.plan));
    memcpy(copy, cascade.workspace, client_workspace_bytes(cascade.api, cascade.plan));
    fixture_step(&plain);
    fixture_step(&cascade);
    bool taken =
        memcmp(copy, cascade.workspace, client_workspace_bytes(cascade.api, cascade.plan)) != 0;
    double difference = fixture_difference(&plain, &cascade);
    /* The plan's next batch has no common prefix. */
    cascade.batch.common_prefix_len = 0;
    memcpy(cascade.workspace, copy, client_workspace_bytes(cascade.api, cascade.plan));
    fixture_step(&cascade);
    bool again =
        strcmp(s->backend, "cpu_ref") == 0 && /* example's own plan lies there, too */
        memcmp(copy, cascade.workspace, client_workspace_bytes(cascade.api, cascade.plan)) != 0;
    if (!(difference < BOUND) || taken != s->expected || again) {
        fail_msg("cascade %s%s, largest difference %g", taken ? "taken" : "not taken",
                 again ? ", without a prefix too" : "", difference);
    }
}

TEST(test_cascade)
{
    const struct attn_layer_desc plain = DECODER(), sinks = DECODER(.has_sinks = 1),
                                 window = DECODER(.has_window = 1, .window_left = 400),
                                 invariant = DECODER(.batch_invariant = 1);
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
        {&plain, "cpu_ref", 8, 272, ATTN_CAUSAL_YES, 0, true},
        {&plain, "cpu_ref", 8, 272, ATTN_CAUSAL_NO, 0, false},
        {&plain, "cpu_ref", 8, 272, 0, ATTN_BATCH_IN_CAPTURE, false},
        {&plain, "cpu_ref", 8, 272, 0, ATTN_BATCH_NO_CASCADE, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_cascade(&cases[i]);
    }
}
