/* SPDX-License-Identifier: Apache-2.0 */
/* Batches whose host arrays are bounds: more queries and keys than the device's say. Outputs are
 * those of the exact batch by every bit, and padding rows stay as they are. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/test.h"

enum { FEW = 5, D = 32, HQ = 4, HK = 2, BLOCK = 16 };

static const int32_t queries[FEW] = {1, 3, 1, 20, 0}, lens[FEW] = {40, 3, 65, 80, 0};

static const struct attn_layer_desc layers[] = {
    DECODER(.host_bounds = 1),
    DECODER(.host_bounds = 1, .num_speculative_tokens = 4),
    DECODER(.host_bounds = 1, .has_window = 1, .window_left = 20),
    DECODER(.host_bounds = 1, .needs_page_lists = 1),
    DECODER(.host_bounds = 1, .output_form = ATTN_OUTPUT_PLAIN, .soft_cap = 20),
};

/* What the engine knows of a step that is still being sampled: each request may have had `more`
 * tokens accepted. Tensors get rows for all. */
struct loose {
    int32_t start[FEW + 1], lens[FEW];
    int64_t slots[MAX_TOKENS], shapes[4][3];
    struct attn_tensor tensors[4];
    float *rows[4];
};

static void loosen(struct fixture *f, struct loose *l, int32_t more)
{
    const struct attn_tensor *given[] = {f->io.q, f->io.k, f->io.v, f->io.out};
    for (int32_t r = 0; r < FEW; r++) {
        l->start[r + 1] = l->start[r] + queries[r] + (r % 2 == 0 ? more : 0);
        l->lens[r] = lens[r] + more;
    }
    const int32_t tokens = l->start[FEW];
    for (int32_t i = 0; i < MAX_TOKENS; i++) {
        l->slots[i] = i < f->batch.num_tokens ? f->slots[i] : -1; /* padding is not written */
    }
    for (int32_t i = 0; i < 4; i++) {
        const int64_t row = given[i]->shape[1] * given[i]->shape[2];
        l->rows[i] = malloc((size_t)(tokens * row) * sizeof(float));
        memset(l->rows[i], 0xff, (size_t)(tokens * row) * sizeof(float)); /* NaN */
        if (i < 3) {
            memcpy(l->rows[i], given[i]->data, (size_t)(f->batch.num_tokens * row) * sizeof(float));
        }
        memcpy(l->shapes[i], given[i]->shape, sizeof l->shapes[i]);
        l->shapes[i][0] = tokens;
        l->tensors[i] = *given[i];
        l->tensors[i].data = l->rows[i];
        l->tensors[i].shape = l->shapes[i];
    }
    f->io.q = &l->tensors[0];
    f->io.k = &l->tensors[1];
    f->io.v = &l->tensors[2];
    f->io.out = &l->tensors[3];
    f->io.lse = NULL;
    f->batch.flags = ATTN_BATCH_HOST_BOUNDS;
    f->batch.num_tokens = f->batch.num_actual_tokens = tokens;
    f->batch.query_start_loc_host = l->start;
    f->batch.seq_lens_host = l->lens;
    f->batch.slot_mapping = l->slots;
    f->batch.num_slots = tokens;
    f->batch.max_query_len = 20 + more;
    f->batch.max_seq_len = 80 + more;
}

static void finish(struct loose *l)
{
    for (int32_t i = 0; i < 4; i++) {
        free(l->rows[i]);
    }
}

TEST(test_looser_than_the_lengths)
{
    static const char *const backends[] = {"cpu_ref", "recording", "recording_narrow"};
    for (size_t i = 0; i < 3 * (sizeof layers / sizeof *layers); i++) {
        for (int32_t more = 0; more < 12; more += 5) {
            OWNED(fixture_finish) struct fixture exact, loose;
            OWNED(finish) struct loose l = {.start = {0}};
            fixture_init(&exact, backends[i % 3], &layers[i / 3], queries, lens, FEW, 0, NULL,
                         true);
            fixture_init(&loose, backends[i % 3], &layers[i / 3], queries, lens, FEW, 0, NULL,
                         true);
            loosen(&loose, &l, more);
            fixture_step(&exact);
            fixture_step(&loose);
            const size_t bytes = (size_t)exact.batch.num_tokens * HQ * D * sizeof(float);
            assert_memory_equal(exact.out, l.rows[3], bytes);
            for (int32_t j = exact.batch.num_tokens * HQ * D; j < l.start[FEW] * HQ * D; j++) {
                uint32_t bits;
                memcpy(&bits, &l.rows[3][j], sizeof bits);
                assert_int_equal(bits, UINT32_MAX);
            }
        }
    }
}

/* A layer that did not say so gets exact lengths. */
TEST(test_refused)
{
    OWNED(fixture_finish) struct fixture f;
    OWNED(finish) struct loose l = {.start = {0}};
    struct attn_layer_desc plain = layers[0];
    plain.host_bounds = 0;
    fixture_init(&f, "recording", &plain, queries, lens, FEW, 0, NULL, true);
    loosen(&f, &l, 5);
    fixture_refuse_plan(&f, "flags");
}

/* Chunks as virtual requests: more of them than the engine's plan has requests. recording refuses
 * more than its limits. */
TEST(test_more_chunks_than_requests)
{
    static const int32_t many[] = {1, 100, 100, MAX_TOKENS - 201}, keys[] = {40, 100, 117, 60};
    const struct attn_layer_desc layer = DECODER(.chunk_size = 8);
    OWNED(fixture_finish) struct fixture whole, composed;
    fixture_init(&whole, "cpu_ref", &layer, many, keys, 4, 0, NULL, false);
    fixture_init(&composed, "recording_narrow", &layer, many, keys, 4, 0, NULL, false);
    fixture_step(&whole);
    fixture_step(&composed);
    assert_true(fixture_difference(&whole, &composed) < 3e-5);
}

/* Validation finds a bound that is too small. */
TEST(test_wrong_bounds)
{
    OWNED(fixture_finish) struct fixture f;
    OWNED(finish) struct loose l = {.start = {0}};
    fixture_init(&f, "recording", &layers[0], queries, lens, FEW, 0, NULL, true);
    loosen(&f, &l, 5);
    l.lens[2] = lens[2] - 1;
    fixture_refuse_plan(&f, "seq_lens");
    l.lens[2] = lens[2];
    l.start[1] = 0; /* a request of one query */
    fixture_refuse_plan(&f, "query_start_loc");
}
